"""Writes what prime-rl computes, while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ratchet.infra.observe.rows import GENERATE
from ratchet.infra.observe.run import ObservedRun, start
from ratchet.infra.observe.sources.prime_rl import named
from ratchet.infra.observe.sources.source import finite, of_validation
from ratchet.infra.observe.sources.traces import content_of_episodes

if TYPE_CHECKING:
    from verifiers.v1 import Episode


class PrimeRLMonitor:
    """A monitor of prime-rl: the episodes that each step trained on, and the metrics of trainer and orchestrator.

    Example::

        import prime_rl.monitors
        prime_rl.monitors.MONITORS.append(PrimeRLMonitor("my-run"))

    A step is written when the next one begins, or the trainer ends. No error of it reaches the trainer.
    """

    def __init__(
        self, run: str, store: str = "file://./runs", config: Mapping[str, Any] | None = None, model: str | None = None
    ) -> None:
        """Opens the run. See `observe.start`."""
        self._run: ObservedRun = start(run, store, trainer="prime-rl", config=config, model=model)
        self._number: int | None = None
        self._episodes: list[tuple[dict[str, Any], str]] = []
        self._metrics: dict[str, Any] = {}

    async def init(self, **kwargs: object) -> None:
        """Does nothing: the run is open."""

    async def log(
        self,
        data: Mapping[str, Any] | Sequence[Episode],
        step: int,
        kind: str = "train",
        subset: str = "effective",
    ) -> None:
        """Takes metrics, or episodes; of those only the ones that a step trained on, or that were evaluated."""
        if isinstance(data, Mapping):
            await self.log_metrics(data, step)
        else:
            await self.log_episodes(data, step, kind, subset)

    async def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Takes metrics of a step."""
        self._run.attempt(lambda: self._begin(step))
        self._metrics |= metrics

    async def log_episodes(self, episodes: Sequence[Episode], step: int, kind: str, subset: str) -> None:
        """Takes the episodes of a step, or of the evaluation before it."""
        if subset == "effective":
            self._run.attempt(lambda: self._take(episodes, step, is_validation=kind == "eval"))

    async def finalize(self) -> None:
        """Writes the last step, and waits until everything is stored."""
        self._run.attempt(self._close)
        self._run.close(finished=True)

    def _begin(self, step: int) -> None:
        if self._number is not None and step > self._number:
            self._close()
        self._number = step

    def _take(self, episodes: Sequence[Episode], step: int, is_validation: bool) -> None:
        self._begin(step)
        records = [(episode.to_record(), f"episode {episode.id}") for episode in episodes]
        if is_validation:
            self._run.validation(of_validation(content_of_episodes(records, is_validation=True)).stages[GENERATE])
        else:
            self._episodes += records

    def _close(self) -> None:
        if self._number is None:
            return
        step = self._run.step(self._number)
        for stage, rows in content_of_episodes(self._episodes, is_validation=False).stages.items():
            if rows:
                step.write(stage, rows)
        step.metrics(named(finite(self._metrics))).close()
        self._number, self._episodes, self._metrics = None, [], {}
