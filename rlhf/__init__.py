"""The library of Ratchet: configuration, trajectories, algorithms, rewards, data, models and engines.

It knows neither Prefect nor the store, and computes nothing at import.
"""
