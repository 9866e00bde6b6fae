"""The link between rank processes and the control plane: settings, heartbeats, rows, process ties. No torch."""
