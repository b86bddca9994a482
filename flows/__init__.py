"""Prefect flows, which order the stages and compute nothing, and the command line that starts them."""

from tasks import prefect_defaults as prefect_defaults
