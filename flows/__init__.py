"""Prefect flows, which order the stages and compute nothing, and the command line that starts them."""

from ratchet.tasks import prefect_defaults as prefect_defaults
