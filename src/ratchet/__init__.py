"""The public names of Ratchet.

>>> import ratchet
>>> run = ratchet.open_run("file://./runs/countdown")
>>> run.trajectories(columns=["prompt", "response", "score"])
>>> ratchet.train(ratchet.load_config("examples/countdown.yaml", ["train.iterations=3"]))
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ratchet.flows.callbacks import Callback
    from ratchet.flows.evaluate import evaluate
    from ratchet.flows.rescore import rescore
    from ratchet.flows.train import train
    from ratchet.infra.runs.listing import RunSummary, runs_of
    from ratchet.infra.runs.query import query
    from ratchet.infra.runs.run import Run, open_run
    from ratchet.rlhf.config import RunConfig, load_config
    from ratchet.rlhf.errors import RatchetError, UserError

_MODULES = {
    "Callback": "ratchet.flows.callbacks",
    "Run": "ratchet.infra.runs.run",
    "RunConfig": "ratchet.rlhf.config",
    "RunSummary": "ratchet.infra.runs.listing",
    "RatchetError": "ratchet.rlhf.errors",
    "UserError": "ratchet.rlhf.errors",
    "evaluate": "ratchet.flows.evaluate",
    "load_config": "ratchet.rlhf.config",
    "open_run": "ratchet.infra.runs.run",
    "query": "ratchet.infra.runs.query",
    "rescore": "ratchet.flows.rescore",
    "runs_of": "ratchet.infra.runs.listing",
    "train": "ratchet.flows.train",
}

__all__ = [
    "Callback",
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
    # imported on use, so that reading a run imports neither torch nor Prefect
    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
