"""`ratchet dataset`: turns the trajectories of runs into training data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from ratchet.flows.commands.console import console
from ratchet.flows.commands.options import DEFAULT_STORE, Names, Store, make_folder, url_of
from ratchet.flows.commands.starting import has_server
from ratchet.flows.terminal import visible
from ratchet.rlhf.data.selection import Kind, Selection
from ratchet.rlhf.errors import UserError, counted

if TYPE_CHECKING:
    from ratchet.infra.runs.training_data import Dataset


def dataset(
    names: Names,
    output: Annotated[
        str, typer.Option("--output", "-o", help="the Parquet file to write or replace, a path or any fsspec URL")
    ],
    kind: Annotated[
        Kind,
        typer.Option(
            help="sft: the best answer of each group; dpo, reward-model: the best and the worst; kto: each answer, "
            "with a label"
        ),
    ],
    min_score: Annotated[
        float | None,
        typer.Option(
            help="smallest score of an answer that is learned, preferred or labelled true; by default, for sft and "
            "kto, that of a solved one; where the run knows none, sft has no limit, and kto's is the mean of the group"
        ),
    ] = None,
    margin: Annotated[
        float | None, typer.Option(help="smallest difference of the scores of a pair; by default any")
    ] = None,
    similarity: Annotated[
        float,
        typer.Option(help="rows at least this similar (Jaccard index) count as near-duplicates; 1: only exact ones"),
    ] = Selection.similarity,
    decontaminate: Annotated[
        bool, typer.Option(help="leave out rows that hold a prompt of the runs' validations")
    ] = Selection.decontaminate,
    balance: Annotated[
        bool, typer.Option("--balance", help="cut every data source to the size of the smallest")
    ] = Selection.balance,
    filter: Annotated[
        str | None,
        typer.Option(
            help="your function of a trajectory that returns True to keep it, as package.module:function or "
            "file.py:function; it chooses before groups are formed"
        ),
    ] = None,
    store: Store = DEFAULT_STORE,
) -> None:
    """Make a dataset of the trajectories of one run or several, for TRL's trainers, `sft` and `reward-model`.

    A group is the answers to one prompt in one iteration. Only closed iterations are read, and answers that were cut
    off at the token limit are never learned. Each row names its run, iteration and trajectory.
    """
    from ratchet.infra.runs.parquet_file import write_parquet
    from ratchet.infra.runs.run import open_run
    from ratchet.infra.runs.training_data import dataset as made_of

    if not output.endswith(".parquet"):
        raise UserError(f"--output {output}: end the name with .parquet, by which readers know the format")
    if "://" not in output:
        make_folder(Path(output).parent)
    selection = Selection(kind, min_score, margin, similarity, decontaminate, balance, filter)
    runs = [open_run(url_of(name, store)) for name in names]
    made = made_of(runs, selection)
    write_parquet(made.table, output)
    if has_server():
        from ratchet.flows.prefect_events import record_dataset

        record_dataset(output if "://" in output else Path(output).resolve().as_uri(), runs, len(made.table))
    _show(made, output)


def _show(made: Dataset, output: str) -> None:
    table = Table("", "", box=box.SIMPLE_HEAD, show_header=False)
    table.columns[0].justify = "right"
    table.add_row(f"{made.trajectories:,}", "trajectories")
    for reason, count in made.left_out.items():
        table.add_row(f"-{count:,}", reason.value)
    table.add_row(f"{len(made.table):,}", "rows")
    console.print(table)
    for note in made.notes:
        console.print(visible(note), highlight=False)
    sources = ", ".join(f"{visible(source)} {count:,}" for source, count in made.sources.items())
    console.print(f"{counted(len(made.table), 'row')} in {output}: {sources}", highlight=False)
