"""Shows progress on the terminal: a bar per stage while it runs, and a line per iteration when it closes."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ratchet.flows.shown_metrics import line
from ratchet.infra.progress import Event, IterationClosed, Note, ReplayProgress, StageProgress, StepProgress, listening
from ratchet.infra.store.run_store import VALIDATE


def visible(text: str) -> str:
    """Escapes control characters, which could move the cursor, set a title or hide text, and surrogates, which UTF-8
    cannot encode, in text from outside."""
    return "".join(character.encode("unicode_escape").decode() if _acts(character) else character for character in text)


def _acts(character: str) -> bool:
    return (character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cs")) or character in BIDIRECTIONAL


BIDIRECTIONAL = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the direction in which text is displayed."""


@contextmanager
def progress(console: Console, iterations: int | None = None) -> Iterator[None]:
    """Shows the events reported inside: live bars on a terminal, plain lines elsewhere."""
    bars = Progress(
        TextColumn("{task.description:<24}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bars, listening(_Terminal(bars, iterations)):
        yield


class _Terminal:
    def __init__(self, bars: Progress, iterations: int | None) -> None:
        self.bars = bars
        self.iterations = iterations
        self.lines: dict[str, TaskID] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case Note(text):
                self._print(text)
            case StageProgress():
                self._stage(event)
            case StepProgress(what, done, total):
                self._bar(what.split(" (")[0], done, total, what)
                if done == total or (not self.bars.console.is_terminal and done % max(total // 10, 1) == 0):
                    self._print(f"{what}: {done}/{total}")
            case ReplayProgress(role, done, total):
                self._print(f"replaying update {done} of the {role}, on the way to version {total}")
            case IterationClosed(iteration, metrics):
                self._closed(iteration, metrics)

    def _stage(self, event: StageProgress) -> None:
        name = f"it {event.iteration} · {event.stage}"
        self._bar(name, event.done, event.total, f"{name} · {event.in_flight} in flight" if event.in_flight else None)
        if event.stage == VALIDATE and event.metrics:
            scores = [f"{name} {value:.3f}" for name, value in event.metrics.items() if "/reward/mean@" in name]
            scores += [f"{name} {value:.0f}" for name, value in event.metrics.items() if name.endswith("_errors")]
            self._print(f"before iteration {event.iteration}: {'  '.join(scores)}")

    def _closed(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for bar in self.lines.values():
            self.bars.remove_task(bar)
        self.lines.clear()
        total = f"/{self.iterations}" if self.iterations else ""
        self._print(f"it {iteration:>4}{total}  {line(metrics)}")

    def _bar(self, key: str, done: int, total: int, text: str | None = None) -> None:
        if key not in self.lines:
            self.lines[key] = self.bars.add_task(text or key, total=total)
        self.bars.update(self.lines[key], completed=done, description=text or key)

    def _print(self, text: str) -> None:
        self.bars.console.print(visible(text), highlight=False, markup=False)
        sys.stdout.flush()
