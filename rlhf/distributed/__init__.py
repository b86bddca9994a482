"""The processes and devices that compute a model together."""
