"""Runs that another trainer computes: its trajectories and metrics, imported from files or written while it trains."""
