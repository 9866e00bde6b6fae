"""The parts between sockets and routes: the protocol, the envelope, keys, limits, streaming."""
