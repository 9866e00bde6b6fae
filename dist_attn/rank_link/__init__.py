"""What rank processes and the control plane share: settings, heartbeats, rows, process ties. Never loads torch."""
