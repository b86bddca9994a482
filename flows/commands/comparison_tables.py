"""Prints the result of `ratchet compare`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from ratchet.flows.commands.options import run_argument
from ratchet.flows.terminal import visible
from ratchet.infra.runs.comparison import Beside, Comparison, Difference, Flip, Kind, Rewards
from ratchet.infra.runs.settings_comparison import SettingsComparison, SideRun
from ratchet.rlhf.errors import counted

ROWS = 10
"""Number of iterations of training that the table shows."""
PART = 150
"""Characters shown of each end of a long prompt or response."""
PLACES: dict[Kind, str] = {"validation": "the validation before iteration", "train": "the training of iteration"}
POLICIES = "one run a side cannot tell seeds from settings; `ratchet compare A1 A2 A3 -- B1 B2 B3` can"
SAME_ANSWERS = "both score the same answers: the difference is one of the rewards, not of the policies"
EACH: dict[Kind, str] = {"validation": "validations", "train": "iterations of training"}


def show(
    console: Console, comparison: Comparison, flips: int, at_least: float | None, format: Literal["table", "json"]
) -> None:
    """Prints a comparison with at most `flips` flipped prompts, and the outcome of the margin `at_least`."""
    if format == "json":
        print(json.dumps(asdict(comparison), ensure_ascii=False))
        return
    console.print(visible(_what_they_share(comparison)), highlight=False)
    beside = {entry.iteration: entry for entry in comparison.beside}
    _table(console, "validation", comparison.differences, beside)
    _table(console, "train", comparison.differences, beside)
    _flipped(console, comparison, flips)
    for line in (*_left_out(comparison), _verdict(comparison)):
        console.print(line, highlight=False)
    if at_least is not None:
        console.print(f"--at-least {at_least:g}: {_outcome(comparison, at_least)}", highlight=False)


def show_settings(
    console: Console, comparison: SettingsComparison, at_least: float | None, format: Literal["table", "json"]
) -> None:
    """Prints a comparison of settings, and the outcome of the margin `at_least`."""
    if format == "json":
        print(json.dumps(asdict(comparison), ensure_ascii=False))
        return
    for side, runs in (("A", comparison.a), ("B", comparison.b)):
        console.print(visible(f"{side} is {_side(runs)}"), highlight=False)
    console.print(visible(f"their settings differ: {'; '.join(comparison.config) or 'in nothing'}"), highlight=False)
    table = Table(title="validation: B minus A, means over runs", box=box.SIMPLE_HEAD, collapse_padding=True)
    for name in ("it", "prompts", "A", "B", "B minus A", "95 % interval", "seen from"):
        table.add_column(name, justify="right", overflow="fold")
    for entry in comparison.differences:
        table.add_row(
            str(entry.iteration),
            str(entry.prompts),
            f"{entry.a:z.3f}",
            f"{entry.b:z.3f}",
            f"{entry.difference:+z.3f}",
            _interval(entry.low, entry.high),
            "–" if entry.smallest is None else f"{entry.smallest:.3f}",
        )
    console.print(table)
    for line in comparison.unknown:
        console.print(visible(line), highlight=False)
    if comparison.unpaired:
        left_out = counted(comparison.unpaired, "answer")
        console.print(f"left out: {left_out} in validations without a counterpart in every other run", highlight=False)
    if comparison.rewards is not None:
        a, b = comparison.rewards.names
        console.print(visible(f"A is scored by {a}, and B by {b}"), highlight=False)
    console.print(_settings_verdict(comparison), highlight=False)
    if at_least is not None:
        console.print(f"--at-least {at_least:g}: {_outcome(comparison, at_least)}", highlight=False)


def _side(runs: Sequence[SideRun]) -> str:
    """Names the runs of a side, with their seeds and scores."""
    return ", ".join(
        f"{run.url.rpartition('/')[2]} ({'' if run.seed is None else f'seed {run.seed}, '}{run.score:z.3f})"
        for run in runs
    )


def _settings_verdict(comparison: SettingsComparison) -> str:
    verdict = _verdict_line(comparison)
    if comparison.smallest is None or comparison.doubt not in (None, "wide interval"):
        return verdict
    runs = f"{len(comparison.a)} and {counted(len(comparison.b), 'run')}"
    return (
        f"{verdict}\nthe interval covers the luck of seeds, as {runs} show it, and the noise of the prompts\n"
        f"with these runs an effect under {comparison.smallest:.3f} would not be seen (with a power of 80 %)"
    )


def _outcome(comparison: Comparison | SettingsComparison, margin: float) -> str:
    if comparison.rewards is not None:
        return "fails, scores of different rewards cannot be compared"
    if comparison.falls_short(margin):
        return f"fails, the whole interval is below {margin:g}"
    if comparison.high is None:
        return "holds, there is no interval that could be below it"
    return f"holds, the interval is not wholly below {margin:g}"


def _what_they_share(comparison: Comparison) -> str:
    a, b = (url.rpartition("/")[2] for url in (comparison.a, comparison.b))
    at = comparison.fork
    shared = "they share no history" if at is None else f"they share everything up to {at}"
    seeds = {True: "and have the same seed", False: "and have other seeds", None: "and their seeds are not known"}
    lines = [f"A is {a}, B is {b}; {shared} {seeds[comparison.same_seed]}"]
    if comparison.config or not comparison.unknown:
        lines.append(f"their configs differ: {'; '.join(comparison.config) or 'in nothing'}")
    return "\n".join([*lines, *comparison.unknown])


def _table(console: Console, kind: Kind, every_difference: Sequence[Difference], beside: dict[int, Beside]) -> None:
    """Prints the differences of one kind; the newest ones if they are of training."""
    differences = [difference for difference in every_difference if difference.kind == kind]
    if not differences:
        return
    iterations = sorted({difference.iteration for difference in differences})
    shown = iterations[-ROWS:] if kind == "train" else iterations
    title = f"{'validation' if kind == 'validation' else 'training scores'}: B minus A"
    title += f" (the last {len(shown)} of {len(iterations)} iterations)" if len(shown) < len(iterations) else ""
    has_kl = any(beside[iteration].kl != (None, None) for iteration in shown)
    table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True)
    for name in ("it", "data source", "prompts", "A", "B", "B minus A", "95 % interval", "length", *["KL"] * has_kl):
        table.add_column(name, justify="left" if name == "data source" else "right", overflow="fold")
    for difference in differences:
        if difference.iteration in shown:
            at = beside[difference.iteration]
            table.add_row(
                str(difference.iteration),
                visible(difference.data_source),
                str(difference.prompts),
                f"{difference.a:z.3f}",
                f"{difference.b:z.3f}",
                f"{difference.difference:+z.3f}",
                _interval(difference.low, difference.high),
                _both(at.length, ".1f"),
                *([_both(at.kl, "z.4f")] if has_kl else []),
            )
    console.print(table)


def _interval(low: float | None, high: float | None) -> str:
    return "–" if low is None or high is None else f"{low:+z.3f} to {high:+z.3f}"


def _both(values: tuple[float | None, float | None], number: str) -> str:
    texts = ["–" if value is None else f"{value:{number}}" for value in values]
    return "" if values == (None, None) else ", ".join(texts)


def _flipped(console: Console, comparison: Comparison, limit: int) -> None:
    where = f"{PLACES[comparison.kind]} {comparison.iteration}"
    if comparison.flips is None and comparison.unknown:
        console.print("flips are not shown: the reward is unknown, and so when a prompt is solved", highlight=False)
        return
    if comparison.flips is None:
        console.print(
            "flips are not shown: set validation.solved_score, since this reward does not say when a prompt is solved",
            highlight=False,
        )
        return
    gained = sum(flip.solved_by == "B" for flip in comparison.flips)
    console.print(
        f"{where}: B solves {counted(gained, 'prompt')} that A does not, and A {len(comparison.flips) - gained} that B "
        "does not",
        highlight=False,
    )
    if not (shown := comparison.flips[:limit]):
        return
    few = f": the first {len(shown)} of {len(comparison.flips)}" if len(shown) < len(comparison.flips) else ""
    table = Table(title=f"prompts that flipped{few}", show_lines=True)
    for name in ("prompt_id", "prompt", "answer of A, and its score", "answer of B"):
        table.add_column(name, overflow="fold")
    for flip in shown:
        answer = _telling(flip)
        answers = (f"{_short(given[answer].response)}\n{given[answer].score:.4g}" for given in (flip.a, flip.b))
        table.add_row(*map(visible, (flip.prompt_id, _short(flip.prompt), *answers)))
    console.print(table)


def _telling(flip: Flip) -> int:
    """Returns the pair of answers whose scores differ most in the direction of the flip."""
    sign = 1 if flip.solved_by == "B" else -1
    return max(range(len(flip.a)), key=lambda answer: sign * (flip.b[answer].score - flip.a[answer].score))


def _short(text: str) -> str:
    return text if len(text) <= 2 * PART else f"{text[:PART]} … {text[-PART:]}"


def _left_out(comparison: Comparison) -> list[str]:
    lines = [
        f"left out: {counted(number, 'answer')} in {EACH[kind]} without a counterpart in the other run"
        for kind, number in comparison.unpaired.items()
        if number
    ]
    if comparison.same_seed is False:
        lines.append("training scores are not compared: with another seed each run draws other prompts")
    if comparison.kind == "train":
        lines.append("the verdict is about training scores, since the runs have no validation in common")
    if comparison.unpaired[comparison.kind] > comparison.answers:
        lines.append("most answers are left out: the verdict is about the few that pair")
    if comparison.rewards is None and comparison.same_answers:
        lines.append(SAME_ANSWERS)
    if comparison.rewards is not None:
        lines += map(visible, _rewards(comparison, comparison.rewards))
    return lines


def _rewards(comparison: Comparison, rewards: Rewards) -> list[str]:
    """Names the reward of each run, and the commands that make the scores comparable."""
    names = [run_argument(url) for url in (comparison.a, comparison.b)]
    lines = []
    for place, side in enumerate("AB"):
        parts = [f"{key} {both[place]}" for key, both in rewards.changed.items() if key != "reward.function"]
        if rewards.code is not None:
            parts.append(f"code {rewards.code[place][:12]}")
        details = f" ({', '.join(parts)})" if parts else ""
        lines.append(f"{side} is scored by {rewards.names[place]}{details}")
    if comparison.same_answers:
        return [*lines, SAME_ANSWERS]
    with_bs = shlex.join(f"{key}={b}" for key, (_, b) in rewards.changed.items())
    again = [f"{name}-rescored" for name in names]
    if comparison.same_seed is False:  # their training scores do not pair, and rescored runs have no validations
        a, b = (f"ratchet evaluate {name}" for name in names)
        if rewards.changed:
            then = f"score answers of A with the reward of B: `{a} {with_bs}`, and compare with the validations of B"
        else:
            then = f"score answers of both with the code as it is now: `{a}`, then `{b}`, and compare what they print"
        return [*lines, then]
    commands = [f"ratchet rescore {names[0]} --run {again[0].rpartition('/')[2]} {with_bs}".rstrip()]
    if not rewards.changed:  # both with the code as it is now
        commands.append(f"ratchet rescore {names[1]} --run {again[1].rpartition('/')[2]}")
    commands.append(f"ratchet compare {again[0]} {names[1] if rewards.changed else again[1]}")
    then = ", then ".join(f"`{command}`" for command in commands)
    return [*lines, f"score the training answers of both with one reward: {then}"]


def _verdict(comparison: Comparison) -> str:
    line = _verdict_line(comparison)
    has_interval = comparison.doubt in (None, "wide interval")
    return f"{line}\n{POLICIES}" if has_interval else line


def _verdict_line(comparison: Comparison | SettingsComparison) -> str:
    place = PLACES[comparison.kind] if isinstance(comparison, Comparison) else PLACES["validation"]
    where = f"in {place} {comparison.iteration} over {counted(comparison.prompts, 'prompt')}"
    if comparison.doubt == "different rewards":
        return f"cannot tell: the scores are of different rewards, {where}"
    if comparison.doubt == "equal scores":
        return f"cannot tell: all scores are equal, {where}"
    difference = f"{comparison.verdict}: {comparison.difference:+z.3f}"
    if comparison.doubt == "one prompt":
        return f"{difference}, without an interval, since there is only one prompt, {where}"
    wide = f", wider than half of the range of scores, {comparison.spread:.3g}" if comparison.doubt else ""
    return f"{difference}, 95 % interval {_interval(comparison.low, comparison.high)}{wide}, {where}"
