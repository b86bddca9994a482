"""The stages of an iteration, one file each, and `runner`, which computes and commits them as Prefect tasks."""

from ratchet.tasks import prefect_defaults as prefect_defaults
