"""Stores what another trainer computes, while it trains, as a run that Ratchet's commands and pages show.

>>> from ratchet import observe
>>> with observe.start("my-run", trainer="mine", config={"lr": 1e-6}) as run:
...     for k in range(steps):
...         run.step(k).write("generate", rows).write("score", scores).metrics({"actor/lr": 1e-6}).close()
"""

from ratchet.infra.observe.run import ObservedRun, ObservedStep, start

__all__ = ["ObservedRun", "ObservedStep", "start"]
