"""Advancing a run: the driver that holds its claim, and the executors that run its stages."""
