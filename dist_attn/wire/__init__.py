"""Typed messages and sockets between the processes of the service; never imports torch."""
