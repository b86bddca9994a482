"""Checks before a driver starts, so that all mistakes are reported at once: packages, models, prompts, the run."""
