"""The library of Ratchet: configuration, trajectories, algorithms, rewards, data, models and engines.

It does not depend on Prefect or the store, and computes nothing at import.
"""
