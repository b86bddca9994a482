"""Checks before a driver starts: config, packages, models, prompts, the run itself."""
