"""Work that outlives a connection: kept in a catalogue and on disk, run by any of the API processes that share it."""
