"""Prints tables of a run, of trajectories and of an evaluation."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sized
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ratchet.flows.commands.options import run_argument
from ratchet.flows.shown_metrics import STATUS, shown_in
from ratchet.flows.terminal import visible
from ratchet.infra.execution import heartbeat
from ratchet.infra.execution.neighbours import workers
from ratchet.infra.runs.pictures import described
from ratchet.infra.runs.query import LIMITS
from ratchet.infra.runs.run import Run, own_answers
from ratchet.infra.runs.sql import Statement, execute, isolated, reason
from ratchet.infra.store.images import Images
from ratchet.infra.store.run_store import VALIDATE
from ratchet.rlhf.agents.timelines import COLUMNS, timeline
from ratchet.rlhf.agents.transcripts import transcript
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.data.placeholders import without_patches
from ratchet.rlhf.errors import UserError, counted, reached
from ratchet.rlhf.schema import IMAGES, PARTS, TRAJECTORY, trajectory_of
from ratchet.rlhf.validation import STDERR, means, sums

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence
    from typing import Any

    import pandas as pd

    from ratchet.flows.sweep import Arm
    from ratchet.flows.ui.documents import Decode
    from ratchet.infra.runs.listing import RunSummary
    from ratchet.infra.runs.verify import Finding
    from ratchet.rlhf.agents.timelines import Conversation, Turn
    from ratchet.tasks.analysis.bisect import Hack
    from ratchet.tasks.analysis.explain import Origin
    from ratchet.tasks.analysis.off_policy import Estimate
    from ratchet.tasks.analysis.onset import Onset, Rescored
    from ratchet.tasks.analysis.whatif import Update, WhatIf


SHOWN_CHARACTERS = 600
"""Characters of a message that a timeline prints."""
FOLDED_LINES, FOLDED_CHARACTERS = 3, 200
"""Lines or characters from which on a common beginning of all prompts is folded."""


def status(console: Console, run: Run, last: int) -> None:
    """Prints the stages and metrics of the `last` iterations, and the driver of the run."""
    if run.is_fit:
        title = f"{run.store.url.rpartition('/')[2]}: a fit, {counted(run.state.iteration, 'round')}"
        if run.state.iteration == 0:
            console.print(title)
        else:
            rows(console, run.metrics(last), "table", title)
    else:
        _status(console, run, last)
    if not run.is_fit and run.config.rollout.workers:
        names = workers(run.store.objects)
        console.print(f"{counted(len(names), 'rollout worker')}: {', '.join(names) or 'none'}", highlight=False)
    beat = heartbeat.is_alive(run.store.objects, console.print)
    if beat is not None:
        console.print(f"driven by pid {beat.pid} on {beat.host}")
        return
    last_beat = heartbeat.read(run.store.objects)
    failure = None if last_beat is None else last_beat.failure
    why = "" if failure is None else f"; the last one failed: {visible(failure)}"
    console.print(f"no driver is at work{why}", highlight=False)


def _status(console: Console, run: Run, last: int) -> None:
    from ratchet.tasks.pipeline import shown_stages  # imports torch

    state, config = run.state, run.config
    shown_iterations = range(max(0, state.iteration - last), max([state.iteration, *state.ahead]) + 1)
    by_iteration = {iteration: run.progress(iteration) for iteration in shown_iterations}
    assert state.claim is not None, "run.config is the claim's"
    stages = shown_stages(config, state.claim.versions, (name for done in by_iteration.values() for name in done))
    title = f"{config.run.name}: {reached(state.iteration, config.known_iterations)}"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("it", justify="right")
    for label in stages.values():
        table.add_column(label, justify="center", overflow="fold")
    unknown = False
    for iteration, progress in by_iteration.items():
        unknown |= any(text.endswith("/?") for text in progress.values())
        missing = "·" if iteration >= state.iteration else ""
        if progress or not missing:
            stages_done = [progress.get(name, "" if name == VALIDATE else missing) for name in stages]
            table.add_row(str(iteration), *stages_done)
    legend = "✓ committed, – skipped, 2/4 shards committed, · missing"
    if unknown:
        legend += "; 13/?: the number of shards depends on the prompts of validation.data"
    console.print(table, legend, highlight=False)
    metrics = run.metrics(last)
    shown = [display for display in shown_in(STATUS) if display.name in metrics]
    numbers = Table("it", box=box.SIMPLE_HEAD)
    for display in shown:
        numbers.add_column(display.name, overflow="fold")
    for row in metrics.to_dict("records"):
        numbers.add_row(f"{row['iteration']:.0f}", *(display.text(row[display.name]) for display in shown))
    if shown:
        console.print(numbers)
    _failures(console, run, metrics)
    if config.observed is not None:
        console.print(f"computed by {visible(config.observed.trainer)}, {state.slot + 1} log records", highlight=False)
        return
    snapshots = ", ".join(map(str, sorted(state.snapshots))) or "none"
    console.print(f"term {state.term}, {state.slot + 1} log records, snapshots after iterations: {snapshots}")
    if state.iteration < config.iterations and config.ends_early(run.deciding_scores()):
        console.print(f"ended early: the last {config.validation.patience} validations were no better")


def _failures(console: Console, run: Run, metrics: pd.DataFrame) -> None:
    from ratchet.tasks.failures import METRICS, told  # imports torch

    failed = metrics[metrics[[name for name in METRICS if name in metrics]].gt(0).any(axis=1)]
    if len(failed):
        for manifest in run.store.manifests(int(failed["iteration"].max())).values():
            for text in told(run.store, run.config, manifest):
                console.print(visible(text), highlight=False)


def runs(console: Console, summaries: Sequence[RunSummary], store: str, format: str) -> None:
    import pandas as pd

    if not summaries:
        console.print(f"there are no runs in {store}")
        return
    columns = ("run", "state", "iterations", "age", "best validation")
    cells = [_cells(summary) for summary in summaries]
    if format != "table":
        problems = [summary.problem for summary in summaries]
        rows(console, pd.DataFrame(cells, columns=columns).assign(problem=problems), format)
        return
    shown = [columns, *(tuple(map(visible, texts)) for texts in cells)]
    lines = _in_columns(shown, console.width if console.is_terminal else None)
    console.print(*lines, sep="\n", highlight=False)
    for summary in summaries:
        if summary.problem:
            console.print(f"{summary.name}: {summary.state}: {visible(summary.problem)}", highlight=False)


def _in_columns(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Aligns rows in columns, the first two and the last to the left. Cells beyond the width continue on another
    line.
    """
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    limit = sum(widths) + 2 * len(widths) if width is None else width
    # a long name has its own line
    widths[0] = min(widths[0], max(limit - sum(widths[1:-1]) - 2 * (len(widths) - 2), 0))
    lines: list[str] = []
    for row in rows:
        line = ""
        for number, (text, room) in enumerate(zip(row, widths, strict=True)):
            is_last, padding = number == len(widths) - 1, " " * (room - cell_len(text))
            cell = text if is_last else padding + text if number > 1 else text + padding
            if line and text and cell_len(f"{line}  {cell}") > limit:
                lines.append(line.rstrip())
                line = f"  {text}"
            else:
                line = f"{line}  {cell}" if number else cell
        lines.append(line.rstrip())
    return lines


def _cells(summary: RunSummary) -> tuple[str, ...]:
    of = "" if summary.iterations is None else f"/{summary.iterations}"
    best = "" if summary.best_validation is None else "{1:.3f} {0}".format(*summary.best_validation)
    age = "" if math.isinf(summary.age_s) else _age(summary.age_s)
    return summary.name, summary.state, f"{summary.iteration}{of}", age, best


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def show(
    console: Console,
    run: Run,
    iteration: int | None,
    where: str | None,
    columns: str | None,
    limit: int,
    format: str,
    full: bool = False,
) -> None:
    """Prints trajectories of an iteration (None: the last closed one), folding what all prompts share unless `full`."""
    import duckdb

    chosen = max(run.state.iteration - 1, 0) if iteration is None else iteration
    trajectories = run.trajectories(iterations=[chosen])
    if trajectories.empty:
        none_yet = f"iteration {chosen} of {run.config.run.name} has no committed trajectories yet"
        raise UserError("; ".join([none_yet, *_left_out(run, chosen, trajectories)]))
    if columns is None:
        has_turns = "turns" in trajectories and trajectories["turns"].notna().any()
        response: tuple[str, ...] = ("turns", "turn_rewards") if has_turns else ("response",)
        if "calls" in trajectories and trajectories["calls"].notna().any():
            response = ("calls",)
        if "rollout_error" in trajectories and trajectories["rollout_error"].notna().any():
            response += ("rollout_error",)
        images = (IMAGES,) if IMAGES in trajectories and trajectories[IMAGES].map(_length).any() else ()
        names = [name for name in ("trajectory_id", *images, "prompt", *response, "score") if name in trajectories]
    else:
        names = list(trajectories.columns) if columns == "all" else [name.strip() for name in columns.split(",")]
    missing = [name for name in names if name not in trajectories]
    if missing:
        raise UserError(
            f"--columns: there is no column {missing[0]}; the columns are {', '.join(trajectories.columns)}"
        )
    quoted = ", ".join(f'"{name}"' for name in names)
    condition = f"where ({where})" if where else ""
    query = f"select {quoted} from trajectories {condition} limit {limit}"
    connection = isolated(LIMITS.memory_bytes // 2, LIMITS.threads)
    connection.register("trajectories", trajectories)
    try:
        matching = execute(connection, Statement(query)).df()
        count = execute(connection, Statement(f"select count(*) as n from trajectories {condition}")).df()["n"][0]
    except duckdb.Error as error:
        raise UserError(f"--where {where!r}: {reason(error)}") from None
    whole = f"{len(trajectories)} trajectories"
    among = f"{count} that match, of {whole}" if where else whole
    which = f"the first {len(matching)} of {among}" if len(matching) < count else among
    if format in ("table", "md") and IMAGES in matching:
        stored = Images(run.store.objects)
        told = cache(lambda digest: str(described(stored, digest)))
        cells = matching[IMAGES].astype(object)
        matching[IMAGES] = ["\n".join(map(told, cell)) if _length(cell) else "" for cell in cells]
    if format == "table" and not full:
        for name in ("prompt", "calls"):
            if name in matching:
                matching[name] = _folded([_text(value) for value in matching[name]], _questions(trajectories, name))
        for name in ("prompt", "response", "turns"):
            if name in matching:
                matching[name] = [without_patches(_text(value)) for value in matching[name]]
    rows(console, matching, format, f"{run.config.run.name}, iteration {chosen}: {which}")
    if format == "table":
        for line in _left_out(run, chosen, trajectories):
            console.print(line, highlight=False, soft_wrap=True)


def _length(cell: object) -> int:
    """Returns the number of values in a cell of a list; 0 if it is null."""
    return len(cell) if isinstance(cell, Sized) else 0


def show_timeline(console: Console, run: Run, row_id: str, iteration: int | None, format: str) -> None:
    """Prints what happened in a trajectory, turn by turn.

    Args:
        row_id: The id of the trajectory, or of one of its conversations.
        iteration: The iteration of its row; None: the one that its id names.
        format: `table`, for people, or `json`.

    Raises:
        UserError: There is no such trajectory, or it has no turns.
    """
    from pydantic import RootModel

    name, key = run.config.run.name, trajectory_of(row_id)
    named = re.match(r"it(\d+)-", key)
    if iteration is None:
        if named is None:
            raise UserError(f"--agent {row_id}: it names no iteration: add --iteration, or give an id of trajectory_id")
        iteration = int(named[1])
    # of the stage that generates: later ones have no rows of trajectories that failed
    known = run.trajectories(iteration, ["trajectory_id", *COLUMNS])
    rows = known[known["trajectory_id"].map(trajectory_of) == key] if len(known) else known
    if rows.empty or (row_id != key and row_id not in set(rows["trajectory_id"])):
        raise UserError(
            f"--agent {row_id}: iteration {iteration} of {name} has no such trajectory; `ratchet show "
            f"{shlex.quote(run_argument(run.store.url))} --iteration {iteration} --columns trajectory_id` lists some"
        )
    told = timeline(rows.to_dict("records"))
    if row_id != key:
        told = replace(told, conversations=tuple(part for part in told.conversations if part.id == row_id))
    if not any(part.turns for part in told.conversations) and not told.errors:
        is_own = run.config.observed is None
        why = ": the run has neither rollout.environment nor rollout.agent" if is_own else ""
        raise UserError(f"--agent {row_id}: it has no turns{why}; `ratchet show` without --agent prints its response")
    if format == "json":
        print(RootModel(told).model_dump_json())
        return
    console.print(Text(visible(f"{told.id} of {name}{_score_of(run, iteration, told.id)}")))
    for conversation in told.conversations:
        console.print(_timeline_tree(conversation, told.seconds), soft_wrap=False)
    for text in told.errors:
        console.print(Text(f"error: {visible(text)}", style="red"))


def _score_of(run: Run, iteration: int, trajectory_id: str) -> str:
    """Returns the score of a trajectory in words; empty if it has none."""
    if not run.store.shards_of(run.store.iteration_state(iteration), "score"):
        return ""
    scores = run.trajectories(iteration, ["trajectory_id", "score"])
    own = scores.loc[scores["trajectory_id"] == trajectory_id, "score"].tolist()
    return f", score {own[0]:g}" if own else ""


BAR = 24
"""Width of the bar of a trajectory's time, in characters."""
KINDS = (("model", "model_s", "█"), ("tool", "tool_s", "▓"), ("waiting", "waiting_s", "░"))
"""Kinds of seconds: name, attribute of `Turn`, and the character of its part of a bar."""


def _timeline_tree(conversation: Conversation, whole: float) -> Tree:
    tree = Tree(Text(visible(conversation.id), style="bold"))
    for number, turn in enumerate(conversation.turns, 1):
        for role, content in turn.heard:
            tree.add(_quoted(role, content))
        spent = [(kind, getattr(turn, name)) for kind, name, _ in KINDS]
        if turn.model_s is None and turn.answered_s is not None:
            spent.insert(0, ("answered in", turn.answered_s))
        facts = [f"turn {number}"]
        facts += [] if turn.tokens is None else [counted(turn.tokens, "token")]
        facts += [f"{kind} {_seconds(value)}" for kind, value in spent if value is not None]
        facts += [] if turn.reward is None else [f"reward {turn.reward:g}"]
        branch = tree.add(Text.assemble((" · ".join(facts), "dim"), "\n", _bar(turn, whole)))
        if turn.text or not turn.calls:
            branch.add(_quoted("policy", turn.text or "(empty)"))
        for call in turn.calls:
            called = branch.add(_quoted(f"calls {call.name}", call.arguments))
            if call.answer is not None:
                called.add(_quoted("answer", call.answer))
        if turn.answer is not None:
            branch.add(_quoted("environment", turn.answer))
    return tree


def _bar(turn: Turn, whole: float) -> str:
    """Draws where the turn is in the time of the trajectory."""
    if not whole:
        return ""
    bar, at = ["·"] * BAR, turn.start_s or 0.0
    parts = [(turn.answered_s, "█")] if turn.model_s is None else []
    for seconds, mark in [*parts, *((getattr(turn, name), mark) for _, name, mark in KINDS)]:
        if seconds:
            first, last = (min(BAR - 1, int(BAR * each / whole)) for each in (at, at + seconds))
            bar[first : last + 1] = [mark] * (last + 1 - first)
            at += seconds
    return "".join(bar)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.1f} s"


def _quoted(role: str, content: str) -> Text:
    """Formats what was said; long texts are cut, and say so."""
    cut = content[:SHOWN_CHARACTERS]
    more = f"… ({counted(len(content), 'character')}: --format json)" if len(content) > len(cut) else ""
    return Text.assemble((f"{visible(role)}: ", "bold"), visible(cut), more)


def _left_out(run: Run, iteration: int, shown: pd.DataFrame) -> list[str]:
    """Describes the generated trajectories that some stage has no row of, such as failed ones."""
    generated = run.trajectories(iteration, ["trajectory_id", "rollout_error"])
    if "trajectory_id" in shown:
        generated = generated[~generated["trajectory_id"].isin(shown["trajectory_id"])]
    if generated.empty:
        return []
    failed = int(generated["rollout_error"].notna().sum())
    others = len(generated) - failed
    kinds = [f"{failed} that failed"] * (failed > 0) + [f"{others} that a stage has no row of"] * (others > 0)
    condition = " and rollout_error is not null" if failed else ""
    sql = f"select trajectory_id, rollout_error from trajectories where iteration = {iteration}{condition}"
    verb = "is" if len(generated) == 1 else "are"
    name = shlex.quote(run_argument(run.store.url))
    return [f'{" and ".join(kinds)} {verb} left out: `ratchet query {name} "{sql}"`']


def _questions(trajectories: pd.DataFrame, column: str) -> dict[str, str]:
    """Returns the first message of the user by the text of the prompt, where the prompt has one."""
    if column != "prompt" or "messages" not in trajectories:
        return {}
    found: dict[str, str] = {}
    for prompt, messages in zip(trajectories["prompt"], trajectories["messages"], strict=True):
        if not isinstance(messages, str):
            continue
        said = [message["content"] for message in json.loads(messages) if message["role"] == "user"]
        if said and isinstance(said[0], str):
            found[prompt] = said[0]
    return found


def _folded(texts: Sequence[str], questions: Mapping[str, str]) -> list[str]:
    """Folds the common beginning of all texts, up to the user's first message, into one line that tells its size."""
    distinct = list(dict.fromkeys(texts))
    if len(distinct) < 2 and not questions.keys() & set(distinct):
        return list(texts)
    first, last = min(distinct), max(distinct)  # in order, the two that differ the earliest
    differs = (number for number, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    shared = first[: next(differs, len(first))]
    ends = [text.find(questions[text]) for text in distinct if text in questions]
    shared = shared[: min((end for end in ends if end >= 0), default=len(shared))]
    if (line_end := shared.rfind("\n")) >= 0:
        shared = shared[: line_end + 1]
    if shared.count("\n") < FOLDED_LINES and len(shared) < FOLDED_CHARACTERS:
        return list(texts)
    size = f"{counted(len(shared.splitlines()), 'line')}, {counted(len(shared), 'character')}"
    return [f"[{size}: --full]\n{text[len(shared) :]}" for text in texts]


def rows(console: Console, frame: pd.DataFrame, format: str, title: str | None = None) -> None:
    names = [str(name) for name in frame.columns]
    if format == "json":
        print(frame.to_json(orient="records", lines=True) if len(frame) else "", end="")
    elif format == "csv":
        print(visible(frame.to_csv(index=False)), end="")
    elif format == "md":
        print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
        for row in frame.itertuples(index=False):
            print("| " + " | ".join(_short(value).replace("|", "\\|").replace("\n", " ") for value in row) + " |")
    else:
        cells = [[_short(value) for value in row] for row in frame.itertuples(index=False)]
        table = Table(title=title, show_lines=any("\n" in cell for texts in cells for cell in texts))
        for name in names:
            table.add_column(name, overflow="fold")
        for texts in cells:
            table.add_row(*texts)
        console.print(table)


def findings(console: Console, all_findings: Sequence[Finding]) -> None:
    """Prints the findings of a verification, harmless ones last."""
    for finding in sorted(all_findings, key=lambda finding: finding.harmless):
        console.print(visible(f"{finding.key} {finding.what}: {finding.means}"), highlight=False)


def compare_scores(console: Console, old: Run, new: Run) -> None:
    """Prints the scores of two runs for the same trajectories, by iteration, and where the new ones are."""
    columns = ["trajectory_id", "score"]
    iterations = range(new.state.iteration)
    both = own_answers(old.trajectories(iterations, columns)).merge(
        new.trajectories(iterations, columns), on=["iteration", "trajectory_id"], suffixes=("_old", "_new")
    )
    table = Table("it", "trajectories", "old mean", "new mean", "changed", "correlation", box=box.SIMPLE_HEAD)
    for iteration, group in [*both.groupby("iteration"), ("all", both)]:
        before, after = group["score_old"], group["score_new"]
        related = before.corr(after) if before.nunique() > 1 and after.nunique() > 1 else None
        correlation = "–" if related is None else f"{related:z.2f}"
        numbers = (f"{before.mean():z.3f}", f"{after.mean():z.3f}", f"{(before != after).mean():.1%}", correlation)
        table.add_row(str(iteration), str(len(group)), *numbers)
    console.print(table)
    source, name = (run.store.url.rpartition("/")[2] for run in (old, new))
    console.print(
        f"{len(both)} trajectories of {source} are scored again: mean {both['score_old'].mean():z.3f} -> "
        f"{both['score_new'].mean():z.3f}\nthe new scores are in the run {name}, {new.store.url}/trajectories/score",
        highlight=False,
    )


def plan(console: Console, run: Run, config: RunConfig, iteration: int | None, name: str) -> None:
    """Prints which stages of an iteration stay valid under another config, and where a fork would start."""
    from ratchet.tasks.analysis.plan import first_changed
    from ratchet.tasks.analysis.plan import plan as planned

    state = run.state
    has_begun = any(
        stage != VALIDATE for stage in (*state.stages, *state.shards)
    )  # a finished run ends in a validation
    chosen = iteration if iteration is not None else state.iteration if has_begun else max(state.iteration - 1, 0)
    stages = planned(run, config, chosen)
    table = Table("stage", "with this config", "why", title=f"{name}, iteration {chosen}", box=box.SIMPLE_HEAD)
    for entry in stages:
        table.add_row(entry.stage, "stays" if entry.keeps else "runs", "; ".join(entry.why))
    console.print(table)
    if (stage := first_changed(stages)) is None:
        console.print("nothing that is committed would run again: `ratchet train` continues with this config")
    elif any(entry.keeps for entry in stages if entry.stage != VALIDATE):
        console.print(f"to keep the stages that stay, fork: `ratchet fork {name} --at {chosen}:{stage} --run NEW …`")
    else:
        console.print(
            f"no stage stays; to keep earlier iterations, fork: `ratchet fork {name} --at {chosen} --run NEW …`"
        )


def arms(console: Console, tried: Sequence[Arm], page: str) -> None:
    """Prints the results of the arms of a sweep, the tokens they shared, and the URL of their page."""
    from ratchet.flows.sweep import table

    cells = table(tried)
    shown = Table(*cells[0], box=box.SIMPLE_HEAD)
    for row in cells:
        shown.add_row(*map(visible, row.values()))
    console.print(shown)
    shared = sum({arm.run: arm.tokens_shared for arm in tried}.values())
    console.print(
        f"{shared:,} tokens were not generated again; the best arm is {cells[0]['run']}\n"
        f"  {page}    the curves and settings of all arms",
        highlight=False,
    )


def hack(
    console: Console,
    run: Run,
    rescored: Sequence[Rescored],
    found: Hack | None,
    reward: str,
    limit: int,
    command: str,
    more: int,
) -> None:
    """Prints where a run's reward and a stricter one diverge, and the trajectories that show it.

    Args:
        console: Where to print.
        run: The run.
        rescored: The iterations that were scored again.
        found: Where the rewards diverge; None if they do not.
        reward: The stricter reward.
        limit: How many trajectories to print.
        command: The command that searches again.
        more: Its `--more`, this time.
    """
    table = Table("it", "the run's reward", "stricter", "gap", "±", box=box.SIMPLE_HEAD)
    for entry in rescored:
        numbers = (entry.reward, entry.strict, entry.gap, entry.error)
        table.add_row(str(entry.iteration), *(f"{number:z.3f}" for number in numbers))
    console.print(table)
    name, closed = run.store.url.rpartition("/")[2], run.state.iteration
    again = f"{counted(len(rescored), 'iteration')} of {closed} scored again"
    if found is None:
        console.print(f"the rewards do not part: the gap grows by no more than its noise ({again})", highlight=False)
        return
    at = found.iteration
    console.print(
        f"the gap opens in the generations of iteration {at}, after the update of iteration {at - 1} ({again})",
        highlight=False,
    )
    console.print(visible(confidence(found.onset, command, more)), highlight=False)
    from ratchet.flows.ui.documents import decoder

    decode = decoder(run) if "advantages" in found.examples else None
    for row in found.examples.head(limit).to_dict("records"):
        said = f"{row['trajectory_id']}: score {row['score']:.3f}, stricter {row['strict']:.3f}"
        advantage = "" if math.isnan(row["advantage"]) else f", advantage {row['advantage']:+.3f}"
        console.print(f"\n{said}{advantage}", highlight=False)
        console.print(visible(str(row["prompt"])).strip(), style="dim", highlight=False)
        console.print(_coloured(row, decode), highlight=False)
    if run.config.observed is not None:
        console.print(f"\nIteration {at} has {len(found.examples)} such trajectories", highlight=False)
        return
    console.print(
        f"\nIteration {at} has {len(found.examples)} such trajectories. This begins again just before, with the same "
        f"generations:\n"
        f"  ratchet fork {name} --at {at - 1}:score --run NEW reward.function={reward}",
        highlight=False,
    )


def confidence(onset: Onset, command: str, more: int) -> str:
    """Says how sure an onset is, and how to make it surer."""
    from ratchet.tasks.analysis.onset import MOST_MORE

    if onset.low == onset.high:
        return f"how sure this is: the 90 % interval is iteration {onset.low} alone"
    sure = f"how sure this is: the 90 % interval is iterations {onset.low} to {onset.high}"
    if onset.unseen == 0:
        return f"{sure}, and all that could narrow it are scored: only more prompts per iteration would"
    further = min(onset.unseen, MOST_MORE)
    return f"{sure}; `{command} --more {more + further}` scores {further} more of these to narrow it"


def what_if(console: Console, results: Sequence[WhatIf], format: str) -> None:
    """Prints iterations under other settings, and what the settings would change in the mean score."""
    from ratchet.tasks.analysis.whatif import by_gain

    means = by_gain(results)
    if format == "json":
        document = {
            "iterations": [asdict(result) for result in results],
            "arms": [{"arm": arm, "objective": None if mean is None else asdict(mean)} for arm, mean in means],
        }
        console.out(json.dumps(document, indent=2), highlight=False)
        return
    arms = {arm: str(number) for number, arm in enumerate(dict.fromkeys(result.arm for result in results), 1)}
    selects = any(result.selected[0] != result.selected[1] for result in results)
    learns = ["learns"] if selects else []
    table = Table("it", "arm", "scores", "mean", "signs", *learns, "norm", "cosine", "clip", "change", "sample")
    table.box = box.SIMPLE_HEAD
    iteration: int | None = None
    for result in results:
        if result.iteration != iteration:
            iteration = result.iteration
            trained = [str(result.selected[0])] if selects else []
            cells = ["run", "", f"{result.score[0]:z.3f}", "", *trained, *_of_update(result.made), "", ""]
            table.add_row(str(iteration), *cells, style="dim")
        table.add_row(
            "",
            arms[result.arm],
            f"{result.changed_scores:.0%}",
            f"{result.score[1]:z.3f}",
            f"{result.changed_signs:.0%}",
            *([str(result.selected[1])] if selects else []),
            *_of_update(result.update),
            *_gain(result.objective),
        )
    console.print(table)
    for result in results:
        if result.update is None:
            console.print(f"iteration {result.iteration}, arm {arms[result.arm]}: no update, {visible(result.why_not)}")
    for arm, mean in means:
        console.print(f"arm {arms[arm]}, {visible(arm)}: {_verdict(mean)}", highlight=False)


def _of_update(update: Update | None) -> list[str]:
    if update is None:
        return ["", "", ""]
    clipped = update.metrics.get("actor/pg_clipfrac")
    return [
        f"{update.norm:.3g}",
        "" if update.cosine is None else f"{update.cosine:z.3f}",
        "" if clipped is None else f"{clipped:.1%}",
    ]


def _gain(estimate: Estimate | None) -> list[str]:
    """Returns what an update changes in the mean score, and the share of the trajectories that counts."""
    if estimate is None:
        return ["", ""]
    return [f"{estimate.change:+z.4f}" if estimate.tells else "?", f"{estimate.effective:.0%}"]


def _verdict(mean: Estimate | None) -> str:
    if mean is None:
        return "cannot tell what the update would change in the mean score"
    low, high = mean.change - mean.reach, mean.change + mean.reach
    said = "no difference seen" if not mean.differs else "better" if mean.change > 0 else "worse"
    return f"{said}, mean score {mean.change:+z.4f} after an update, 95 % interval {low:+z.4f} to {high:+z.4f}"


def _coloured(row: Mapping[Hashable, Any], decode: Decode | None) -> Text:
    """Colours the tokens of a response: green for a positive advantage, red for a negative one."""
    if decode is None or any(row.get(name) is None for name in ("response_ids", "advantages", "loss_mask")):
        return Text(visible(str(row["response"])))
    from ratchet.flows.ui.documents import token_texts

    text = Text()
    pieces = token_texts(tuple(int(token) for token in row["response_ids"]), decode)
    for piece, advantage, learned in zip(pieces, row["advantages"], row["loss_mask"], strict=True):
        style = "" if not learned or advantage == 0 else "green" if advantage > 0 else "red"
        text.append(visible(piece), style=style)
    return text


def lineage(console: Console, origin: Origin, format: str) -> None:
    """Prints a lineage as JSON or as a tree, which is wrapped only on a terminal."""
    if format == "json":
        print(json.dumps(asdict(origin), ensure_ascii=False))
    elif console.is_terminal:
        console.print(tree(origin), soft_wrap=False)
    else:
        Console(width=1_000_000, file=console.file).print(tree(origin))


def tree(origin: Origin) -> Tree:
    branch = Tree(Text(origin.what, style="bold"))
    for detail in origin.details:
        branch.add(Text(detail, style="dim"))
    for source in origin.made_from:
        branch.children.append(tree(source))
    return branch


def write(answers: pd.DataFrame, path: Path) -> None:
    """Writes an evaluation's trajectories as Parquet, with the types of the trajectory schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = TRAJECTORY.arrow(tuple(answers.columns))
    parts = {
        field.name: answers[field.name].map(lambda cell: list(cell.items())) for field in schema if field.type == PARTS
    }
    pq.write_table(pa.Table.from_pandas(answers.assign(**parts), schema=schema), path)


def solve_rates(answers: pd.DataFrame, title: str, on_error: str, solved: float | None) -> Table:
    """Tabulates mean scores by data source, with a 95 % interval over prompts, and statistics of n answers per
    prompt.
    """
    table, captions = Table(title=title), list[str]()
    n = int(answers.groupby("prompt_id").size().max())
    for column, what, left_out in (
        ("rollout_error", "environments", True),
        ("reward_error", "rewards", on_error == "drop"),
    ):
        failed = answers[column].notna()
        if failed.any():
            counted = "left out" if left_out else "count as 0"
            captions.append(f"{failed.sum()} {what} failed, and {counted}: {visible(answers[column][failed].iloc[0])}")
        if left_out:
            answers = answers[~failed]
    if captions:
        table.caption = "\n".join(captions) + "\n"
    sources, prompts, texts, scores = (
        answers[name].tolist() for name in ("data_source", "prompt_id", "response", "score")
    )
    by_source = means([sums(sources, prompts, texts, scores, n, solved)])
    number = ".1%" if all(0 <= score <= 1 for score in scores) else ".3f"  # scores of a reward model are not shares
    for column in ("data source", "prompts", "trajectories", "mean score", "95 % interval", "well formed"):
        table.add_column(column, justify="left" if column == "data source" else "right")
    for source, group in answers.groupby("data_source"):
        mean, half = mean_and_interval(group)
        statistics = by_source[str(source)]
        if n > 1 or statistics.get("pass@1", mean) != mean:  # otherwise they only repeat the mean
            shown = (
                f"{name} {value:{number}}"
                for name, value in statistics.items()
                if name != "mean_score" and not name.endswith(STDERR)
            )
            table.caption = f"{table.caption or ''}{source}: {', '.join(shown)}\n"
        formed = [parts.get("well_formed") for parts in group["reward_parts"]]
        known = [value for value in formed if value is not None]
        table.add_row(
            visible(str(source)),
            str(group["prompt_id"].nunique()),
            str(len(group)),
            f"{mean:{number}}",
            f"{mean - half:{number}} to {mean + half:{number}}",
            f"{sum(known) / len(known):.1%}" if known else "",
        )
    return table


def mean_and_interval(answers: pd.DataFrame) -> tuple[float, float]:
    """Returns the mean score, and half the width of its 95 % interval (normal approximation over means of prompts)."""
    prompts = answers.groupby("prompt_id")["score"].mean()
    return float(prompts.mean()), 1.96 * float(prompts.std(ddof=1)) / math.sqrt(len(prompts)) if len(
        prompts
    ) > 1 else 0.0


def _short(value: object) -> str:
    return visible(_text(value))


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    if hasattr(value, "tolist") or isinstance(value, list):
        if len(value) and isinstance(value[0], dict) and "asked" in value[0]:  # type: ignore[arg-type,index]
            return "\n".join(f"{role}: {content}" for role, content in transcript(value))  # type: ignore[arg-type]
        if len(value) and isinstance(value[0], dict):  # type: ignore[arg-type,index]
            return "\n".join(f"{turn['role']}: {turn['content']}" for turn in value)  # type: ignore[attr-defined]
        return "[" + ", ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in list(value)) + "]"  # type: ignore[call-overload]
    return f"{value:.4g}" if isinstance(value, float) else str(value)
