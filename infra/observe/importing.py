"""Imports a trainer's files as a run: what the run has is left alone, and what is new is added."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ratchet.infra.execution.stopping import on_signals
from ratchet.infra.observe.rows import GENERATE, check_names
from ratchet.infra.observe.run import Step, StepWriter, Validation, observed_config
from ratchet.infra.observe.sources.source import Content, Source, Unit, of_validation
from ratchet.infra.progress import StepProgress, report
from ratchet.infra.store.run_store import VALIDATE
from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.errors import UserError, in_one_line

LOOK_S = 2.0
"""Seconds between two looks for new files."""


@dataclass
class Imported:
    """What an import has done."""

    url: str
    steps: int = 0
    validations: int = 0
    trajectories: int = 0
    already: int = 0
    """Steps and validations that the run had."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Fields that no column keeps, with the number of steps that have them."""


def import_run(
    source: Source,
    name: str,
    store: str,
    *,
    model: str | None = None,
    tokenizer: str | None = None,
    follow: bool = False,
) -> Imported:
    """Imports what is complete.

    Args:
        source: the files.
        name: the run, which is created if it does not exist.
        store: the store of the run.
        model: the model that was trained; None: what the files say.
        tokenizer: a model folder or name on the hub, whose tokenizer makes the tokens that the files lack.
        follow: look for new steps until interrupted. The newest step is left for later, as it may still be written.

    Returns:
        What was imported, also if `follow` was interrupted.

    Raises:
        UserError: the files are malformed, or differ from what was imported from them before.
        Fenced: another process writes the run.
    """
    made = None if tokenizer is None else _Tokens(tokenizer)
    own = {**source.config, **({} if made is None else {"tokens": f"made again from texts with {tokenizer}"})}
    writer = StepWriter(observed_config(name, store, source.trainer, own, tokenizer or model or source.model))
    first = _in_order(source)
    if not first and not follow:
        raise UserError("there is no complete step in these files")
    with _open(writer):
        known, validated = writer.imported()
        imported = Imported(writer.store.url, already=sum(_is_there(unit, known, validated) for unit in first))
        stopped = threading.Event()
        with on_signals(lambda *_: stopped.set()) if follow else nullcontext():
            units = first
            while True:
                _add(writer, units[: len(units) - 1] if follow else units, known, validated, made, imported, stopped)
                if not follow or stopped.wait(LOOK_S):
                    break
                units = _in_order(source)
        if not follow:
            writer.finish()
        return imported


@contextmanager
def _open(writer: StepWriter) -> Iterator[None]:
    writer.open()
    try:
        yield
    except BaseException as error:
        writer.close(in_one_line(error) or type(error).__name__)
        raise
    writer.close()


def _in_order(source: Source) -> list[Unit]:
    return sorted(source.units(), key=lambda unit: (unit.number, unit.is_validation))


def _add(
    writer: StepWriter,
    units: list[Unit],
    known: dict[int, str],
    validated: set[str],
    made: _Tokens | None,
    imported: Imported,
    stopped: threading.Event,
) -> None:
    """Commits those units that the run lacks, until it is stopped."""
    newest = max(known, default=-1)
    for done, unit in enumerate(units, 1):
        if stopped.is_set():
            return
        if _is_there(unit, known, validated):
            continue
        if not unit.is_validation and unit.number <= newest:
            changed = unit.number in known
            why = "has changed since it was imported" if changed else f"comes before step {newest}, which the run has"
            raise UserError(f"{unit.where}: step {unit.number} {why}: import the files as another run (--run)")
        if unit.is_validation and unit.number < newest:  # it would count as one of newer weights
            imported.left_out["validations that come after later steps"] += 1
            validated.add(unit.digest)  # counted once, however often `follow` looks
            continue
        content = _read(unit, made)
        imported.left_out.update(content.left_out)
        rows = content.stages.get(GENERATE, [])
        try:
            if unit.is_validation:
                check_names(VALIDATE, rows)
                writer.validate(Validation(rows, unit.number, unit.digest))
                validated.add(unit.digest)
                imported.validations += 1
            else:
                for stage, of_stage in content.stages.items():
                    check_names(stage, of_stage)
                writer.commit(Step(unit.number, content.stages, content.metrics, unit.digest))
                known[unit.number], newest = unit.digest, unit.number
                imported.steps += 1
        except UserError as error:
            raise UserError(f"{unit.where}: step {unit.number}: {error}") from None
        imported.trajectories += len(rows)
        report(StepProgress("importing", done, len(units)))


def _is_there(unit: Unit, known: Mapping[int, str], validated: Collection[str]) -> bool:
    return unit.digest in validated if unit.is_validation else known.get(unit.number) == unit.digest


def _read(unit: Unit, made: _Tokens | None) -> Content:
    content = unit.read()
    if unit.is_validation:
        content = of_validation(content)
    if made is not None:
        made.fill_in(content.stages.get(GENERATE, []))
    return content


class _Tokens:
    """Makes tokens from texts."""

    def __init__(self, name: str) -> None:
        from ratchet.rlhf.models.tokenizers import load_tokenizer

        self._encode: Callable[..., Any] = load_tokenizer(ModelConfig(path=name), writes=False)

    def fill_in(self, rows: list[dict[str, Any]]) -> None:
        """Adds the tokens of prompts and responses that have none."""
        for text, ids in (("prompt", "prompt_ids"), ("response", "response_ids")):
            lacking = [row for row in rows if row.get(ids) is None and isinstance(row.get(text), str)]
            if lacking:
                encoded = self._encode([row[text] for row in lacking], add_special_tokens=False)["input_ids"]
                for row, tokens in zip(lacking, encoded, strict=True):
                    row[ids] = tokens
