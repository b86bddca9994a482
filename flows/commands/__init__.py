"""The command line, `ratchet`."""
