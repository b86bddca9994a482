"""The public names of Ratchet.

>>> import ratchet
>>> run = ratchet.open_run("file://./runs/countdown")
>>> run.trajectories(columns=["prompt", "response", "score"])
>>> ratchet.train(ratchet.load_config("examples/countdown.yaml", ["train.iterations=3"]))

A name is imported when it is used, so that reading a run does not import torch or Prefect.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flows.evaluate import evaluate
    from flows.rescore import rescore
    from flows.train import train
    from infra.listing import RunSummary, runs_of
    from infra.query import query
    from infra.runs import Run, open_run
    from rlhf.config import RunConfig, load_config
    from rlhf.errors import RatchetError, UserError

_MODULES = {
    "Run": "infra.runs",
    "RunConfig": "rlhf.config",
    "RunSummary": "infra.listing",
    "RatchetError": "rlhf.errors",
    "UserError": "rlhf.errors",
    "evaluate": "flows.evaluate",
    "load_config": "rlhf.config",
    "open_run": "infra.runs",
    "query": "infra.query",
    "rescore": "flows.rescore",
    "runs_of": "infra.listing",
    "train": "flows.train",
}

__all__ = [
    "RatchetError",
    "Run",
    "RunConfig",
    "RunSummary",
    "UserError",
    "evaluate",
    "load_config",
    "open_run",
    "query",
    "rescore",
    "runs_of",
    "train",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return version("ratchet-rlhf")
    if name not in _MODULES:
        raise AttributeError(f"module 'ratchet' has no attribute {name!r}")
    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
