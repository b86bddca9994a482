"""Stores what another trainer computes, while it trains, as a run that Ratchet's commands and pages show.

>>> from ratchet import observe
>>> with observe.start("my-run", trainer="mine", config={"lr": 1e-6}) as run:
...     for k in range(steps):
...         run.step(k).write("generate", rows).write("score", scores).metrics({"actor/lr": 1e-6}).close()

TRL, prime-rl and verifiers have hooks: `TRLCallback`, `PrimeRLMonitor`, `VerifiersHook`. verl loads its own
(`ratchet.infra.observe.verl_plugin`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ratchet.infra.observe.run import ObservedRun, ObservedStep, start

if TYPE_CHECKING:
    from ratchet.infra.observe.prime_rl import PrimeRLMonitor
    from ratchet.infra.observe.trl import TRLCallback
    from ratchet.infra.observe.verifiers import VerifiersHook

_HOOKS = {"PrimeRLMonitor": "prime_rl", "TRLCallback": "trl", "VerifiersHook": "verifiers"}
"""Imported when they are used, as some import their trainer."""

__all__ = ["ObservedRun", "ObservedStep", "PrimeRLMonitor", "TRLCallback", "VerifiersHook", "start"]


def __getattr__(name: str) -> object:
    if name not in _HOOKS:
        raise AttributeError(f"module 'ratchet.observe' has no attribute {name!r}")
    hook: object = getattr(import_module(f"ratchet.infra.observe.{_HOOKS[name]}"), name)
    return hook
