"""Progress on the terminal: one line a stage while it runs, one line an iteration when it closes."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from infra.progress import listening


def visible(text: str) -> str:
    """Text from outside as a terminal may be given it: control characters, which could move the cursor, set a title or
    hide what was printed, are shown as escapes; so is what no UTF-8 can hold."""
    return "".join(character.encode("unicode_escape").decode() if _acts(character) else character for character in text)


def _acts(character: str) -> bool:
    return (character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cs")) or character in BIDIRECTIONAL


BIDIRECTIONAL = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""They make text read otherwise than it is."""


@contextmanager
def progress(console: Console, iterations: int | None = None) -> Iterator[None]:
    """Show what is reported inside: live bars on a terminal, plain lines elsewhere."""
    bars = Progress(
        TextColumn("{task.description:<24}"),
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

    def __call__(self, event: str, details: dict[str, Any]) -> None:
        getattr(self, f"_{event}")(**details)

    def _note(self, text: str) -> None:
        self._print(text)

    def _stage(self, iteration: int, stage: str, done: int, total: int, metrics: dict[str, float] | None) -> None:
        self._bar(f"it {iteration} · {stage}", done, total)
        if stage == "validate" and metrics:
            shown = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items() if name.endswith("mean_score"))
            self._print(f"before iteration {iteration}: {shown}")

    def _steps(self, what: str, done: int, total: int) -> None:
        name = what.split(" (")[0]
        self._bar(name, done, total, what)
        if done == total or (not self.bars.console.is_terminal and done % max(total // 10, 1) == 0):
            self._print(f"{what}: {done}/{total}")

    def _replay(self, role: str, done: int, total: int) -> None:
        self._print(f"replaying update {done} of the {role}, on the way to version {total}")

    def _closed(self, iteration: int, metrics: dict[str, float]) -> None:
        for line in self.lines.values():
            self.bars.remove_task(line)
        self.lines.clear()
        shown = [f"it {iteration:>4}{f'/{self.iterations}' if self.iterations else ''}"]
        for label, name, form in (
            ("score", "critic/score/mean", ".3f"),
            ("kl", "actor/ref_kl", ".4f"),
            ("entropy", "actor/entropy", ".3f"),
            ("length", "response_length/mean", ".1f"),
            ("clipped", "actor/pg_clipfrac", ".3f"),
            ("explained", "critic/vf_explained_var", ".2f"),
            ("s", "timing_s/stages", ".1f"),
        ):
            if name in metrics:
                shown.append(f"{label} {metrics[name]:{form}}")
        self._print("  ".join(shown))

    def _bar(self, key: str, done: int, total: int, text: str | None = None) -> None:
        if key not in self.lines:
            self.lines[key] = self.bars.add_task(text or key, total=total)
        self.bars.update(self.lines[key], completed=done, description=text or key)

    def _print(self, text: str) -> None:
        self.bars.console.print(visible(text), highlight=False, markup=False)
        sys.stdout.flush()
