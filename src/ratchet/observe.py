"""Stores what another trainer computes, while it trains, as a run that Ratchet's commands and pages show.

>>> from ratchet import observe
>>> with observe.start("my-run", trainer="mine", config={"lr": 1e-6}) as run:
...     for k in range(steps):
...         run.step(k).write("generate", rows).write("score", scores).metrics({"actor/lr": 1e-6}).close()

Trainers that have hooks need one line; see `TRLCallback`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ratchet.infra.observe.run import ObservedRun, ObservedStep, start

if TYPE_CHECKING:
    from ratchet.infra.observe.trl import TRLCallback

__all__ = ["ObservedRun", "ObservedStep", "TRLCallback", "start"]


def __getattr__(name: str) -> object:
    if name == "TRLCallback":  # on use, as it imports transformers
        value: object = import_module("ratchet.infra.observe.trl").TRLCallback
        return value
    raise AttributeError(f"module 'ratchet.observe' has no attribute {name!r}")
