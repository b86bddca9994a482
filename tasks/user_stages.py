"""Loads the stages that `run.stages` names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ratchet.infra.workers.calls import C, Context, S, ShardOutput
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.named import blamed, load_object, source_of
from ratchet.tasks.stage import RowsStage, Stage

KEY = "run.stages"


def load_stage(name: str, stages: Sequence[Stage]) -> Stage:
    """Imports a stage. Its version is that of its source, so that a change of the code counts as one.

    Args:
        name: ``package.module:STAGE`` or ``file.py:STAGE``.
        stages: the other stages, which it may read.

    Raises:
        UserError: there is no such stage, or it does not fit the others; one line for each mistake.
    """
    stage = load_object(name, KEY, ("STAGE",))
    if not isinstance(stage, RowsStage):
        raise UserError(
            f"{KEY} {name} is no ratchet.tasks.stage.RowsStage, the only kind that can be added: make it one"
        )
    if mistakes := check_fits(stage, stages):
        raise UserError("\n".join(f"{KEY} {name} {mistake}" for mistake in mistakes))
    compute = partial(_compute, name, stage.compute)
    source_digest = hashlib.sha256(source_of(stage.compute, KEY, name).encode()).hexdigest()
    return replace(stage, compute=compute, version=int(source_digest[:12], 16))


def _compute(name: str, compute: Callable[[Context[C]], ShardOutput[S]], context: Context[C]) -> ShardOutput[S]:
    """Calls the user's function; an exception names its line."""
    with blamed(KEY, name, compute):
        return compute(context)


def check_fits(stage: RowsStage[C, S], stages: Sequence[Stage]) -> list[str]:
    """Returns what keeps a stage from running beside others: names and columns that are taken or missing."""
    known = {other.name: other for other in stages}
    taken = {column.name: other.name for other in stages if isinstance(other, RowsStage) for column in other.writes}
    mistakes = [f"is called {stage.name}, as another stage: rename it"] if stage.name in known else []
    mistakes += [
        f"writes {column.name}, as {taken[column.name]} does: rename it"
        for column in stage.writes
        if column.name in taken
    ]
    if not stage.reads:
        mistakes.append("reads no stage: declare at least generate")
    for source, columns in stage.reads.items():
        other = known.get(source)
        if not isinstance(other, RowsStage):
            mistakes.append(f"reads {source}, which is no stage with rows before it: {', '.join(known)}")
            continue
        has = ("trajectory_id", *(column.name for column in other.writes))
        mistakes += [f"reads {column}, which {source} does not write" for column in columns if column not in has]
    return mistakes
