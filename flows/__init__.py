"""Prefect flows: they order the stages and compute nothing. And the command line that starts them."""

from tasks import prefect_defaults as prefect_defaults
