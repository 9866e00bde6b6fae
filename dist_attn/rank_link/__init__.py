"""What rank processes and the control plane share: identities, heartbeats, rows, process ties. Never loads torch."""
