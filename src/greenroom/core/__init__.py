"""The scheduler core: events in, actions out; no clock, no chance, no files, no sockets."""
