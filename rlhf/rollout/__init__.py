"""Rollout engines: models that generate."""
