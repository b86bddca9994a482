"""Stores, shards, digests and sends weights."""
