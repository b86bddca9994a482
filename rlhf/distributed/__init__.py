"""Processes and devices that compute a model together."""
