"""`ratchet import`: other trainers' files as a run."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet.flows.commands.console import console
from ratchet.flows.commands.options import DEFAULT_STORE, Store
from ratchet.rlhf.errors import UserError, counted

if TYPE_CHECKING:
    from ratchet.infra.observe.sources.source import Source


class Format(StrEnum):
    jsonl = "jsonl"
    prime_rl = "prime-rl"
    trl = "trl"
    verifiers = "verifiers"
    verl = "verl"
    nemo_rl = "nemo-rl"
    openrlhf = "openrlhf"
    atif = "atif"


def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="a file or folder that the trainer wrote")],
    format: Annotated[Format, typer.Option("--from", help="the trainer, or jsonl: JSON lines with --map")],
    run: Annotated[str, typer.Option(help="name of the run to write, or to add to")],
    validation: Annotated[
        Path | None, typer.Option(help="a folder with the validations, if the trainer writes them apart (verl)")
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="a file with the metrics, if the trainer writes it elsewhere (verl)")
    ] = None,
    map: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN=FIELD,…",
            help="fields of JSON lines, such as prompt=input,response=output,score=reward,iteration=step",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="model whose tokenizer makes the tokens that the files lack: a folder, or a name on the hub"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="the model that was trained; by default what the files say")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="add new steps as they are written, until Ctrl-C")] = False,
    store: Store = DEFAULT_STORE,
) -> None:
    """Import another trainer's rollouts, scores and metrics as a run that every command on stored runs reads.

    The same command again adds what is new.
    """
    from ratchet.flows.terminal import progress
    from ratchet.infra.observe.importing import import_run

    opened = _source(source, format, validation, metrics, _mapping(map))
    with progress(console):
        imported = import_run(opened, run, store, model=model, tokenizer=tokenizer, follow=follow)
    parts = [counted(imported.steps, "step"), counted(imported.validations, "validation")]
    console.print(
        f"{run}: {' and '.join(parts)} imported, {imported.trajectories} trajectories"
        + (f"; {imported.already} were there" if imported.already else ""),
        highlight=False,
    )
    if imported.left_out:
        console.print(f"left out: {', '.join(sorted(imported.left_out))}", highlight=False)


def _mapping(text: str | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, (text or "").split(",")):
        column, equals, name = part.partition("=")
        if not equals or not column.strip() or not name.strip():
            raise UserError(f"--map {part!r}: write COLUMN=FIELD, such as prompt=input,response=output")
        pairs[column.strip()] = name.strip()
    return pairs


def _source(
    path: Path, format: Format, validation: Path | None, metrics: Path | None, mapping: dict[str, str]
) -> Source:
    for option, value, of in (
        ("--validation", validation, Format.verl),
        ("--metrics", metrics, Format.verl),
        ("--map", mapping, Format.jsonl),
    ):
        if value and format is not of:
            raise UserError(f"{option} is for --from {of}: leave it out")
    if not path.exists():
        raise UserError(f"{path}: there is no such file or folder")
    from ratchet.infra.observe.sources.atif import ATIF
    from ratchet.infra.observe.sources.jsonl import JSONLines
    from ratchet.infra.observe.sources.nemo_rl import NeMoRL
    from ratchet.infra.observe.sources.openrlhf import OpenRLHF
    from ratchet.infra.observe.sources.prime_rl import PrimeRL
    from ratchet.infra.observe.sources.trl import TRL
    from ratchet.infra.observe.sources.verifiers import Verifiers
    from ratchet.infra.observe.sources.verl import Verl

    sources: dict[Format, Callable[[], Source]] = {
        Format.atif: lambda: ATIF(path),
        Format.jsonl: lambda: JSONLines(path, mapping),
        Format.nemo_rl: lambda: NeMoRL(path),
        Format.openrlhf: lambda: OpenRLHF(path),
        Format.prime_rl: lambda: PrimeRL(path),
        Format.trl: lambda: TRL(path),
        Format.verifiers: lambda: Verifiers(path),
        Format.verl: lambda: Verl(path, validation, metrics),
    }
    return sources[format]()
