"""Writes the episodes that verifiers plays."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ratchet.infra.observe.run import start
from ratchet.infra.observe.sources.traces import content_of_episodes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verifiers.v1 import Episode


class VerifiersHook:
    """Takes the episodes of an evaluation as they end, and writes them as one step.

    Example::

        with VerifiersHook("my-evaluation") as hook:
            await env.run_slot(slot, context, semaphore, on_complete=hook)
    """

    def __init__(
        self, run: str, store: str = "file://./runs", config: Mapping[str, Any] | None = None, model: str | None = None
    ) -> None:
        """Opens the run. See `observe.start`."""
        self._run = start(run, store, trainer="verifiers", config=config, model=model, iterations=1)
        self._episodes: list[tuple[dict[str, Any], str]] = []

    async def __call__(self, episode: Episode) -> None:
        """Takes an episode that has ended."""
        self._run.attempt(lambda: self._episodes.append((episode.to_record(), f"episode {episode.id}")))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Writes the episodes, and waits until they are stored."""
        self._run.attempt(self._write)
        self._run.close(finished=True)

    def _write(self) -> None:
        if self._episodes:
            step = self._run.step(0)
            for stage, rows in content_of_episodes(self._episodes, is_validation=False).stages.items():
                if rows:
                    step.write(stage, rows)
            step.close()
