"""Prefect tasks: one file a stage, and `stage`, the deep module that makes a stage durable."""

from tasks import prefect_defaults as prefect_defaults
