"""Data sets, generated and read."""
