"""What the service promises, measured: ranks and processes that are killed, stopped and kept busy."""
