"""Commands that show, query, compare and verify runs, and clean up their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from ratchet.flows.commands.console import console
from ratchet.flows.commands.options import DEFAULT_STORE, DocumentFormat, Format, Name, Names, Store, run_names, url_of
from ratchet.flows.terminal import visible
from ratchet.rlhf.errors import RatchetError, UserError, counted

SIDES = "\0--"
"""What stands for ``--`` among the names of runs; nobody can type it."""


def status(
    name: Name,
    store: Store = DEFAULT_STORE,
    last: Annotated[int, typer.Option(help="iterations to show", min=1)] = 10,
) -> None:
    """Show the stages (committed, running, missing) and metrics of the last iterations."""
    from ratchet.flows.commands import tables
    from ratchet.infra.runs.run import open_run

    tables.status(console, open_run(url_of(name, store)), last)


def ls(
    store: Store = DEFAULT_STORE,
    format: Annotated[Format, typer.Option(help="output format")] = Format.table,
) -> None:
    """List the runs of a store: state, iterations, age, best validation."""
    from ratchet.flows.commands import tables
    from ratchet.infra.runs.listing import runs_of
    from ratchet.infra.runs.run import check_store

    summaries = runs_of(store)
    if not summaries:
        check_store(store)
    tables.runs(console, summaries, store, format.value)


def show(
    name: Name,
    store: Store = DEFAULT_STORE,
    iteration: Annotated[int | None, typer.Option(min=0, help="the iteration; by default the last closed one")] = None,
    where: Annotated[str | None, typer.Option(help='a condition in SQL, such as "score < 0.5"')] = None,
    columns: Annotated[str | None, typer.Option(help="columns, separated by commas, or `all`")] = None,
    limit: Annotated[int, typer.Option(help="maximum number of rows", min=1)] = 20,
    format: Annotated[Format, typer.Option(help="output format")] = Format.table,
    full: Annotated[
        bool, typer.Option("--full", help="with what all prompts begin with, which a table otherwise folds")
    ] = False,
    agent: Annotated[
        str | None,
        typer.Option(metavar="ID", help="a trajectory_id: what happened in it, turn by turn, with its tools and times"),
    ] = None,
) -> None:
    """Show trajectories, with the columns of all stages; with --agent, the turns of one."""
    from ratchet.flows.commands import tables
    from ratchet.infra.runs.run import open_run

    if agent is not None:
        if where or columns or format not in (Format.table, Format.json):
            raise UserError(
                "--agent shows one trajectory: leave out --where and --columns, and use --format json or none"
            )
        tables.show_timeline(console, open_run(url_of(name, store)), agent, iteration, format.value)
        return
    tables.show(console, open_run(url_of(name, store)), iteration, where, columns, limit, format.value, full)


def query(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... SQL",
            help='runs, then SQL such as "select iteration, avg(score) from score group by 1"',
            autocompletion=run_names,
        ),
    ],
    store: Store = DEFAULT_STORE,
    format: Annotated[Format, typer.Option(help="output format")] = Format.table,
) -> None:
    """Run SQL (DuckDB) on the committed data of one run or several.

    The tables are trajectories, metrics, and one for each stage; their column `run` names the run.
    """
    from ratchet.flows.commands import tables
    from ratchet.infra.runs.query import query as ask
    from ratchet.infra.runs.run import open_run

    *names, sql = arguments
    if not names:
        raise UserError(f"query {sql!r}: name a run, then the SQL")
    tables.rows(console, ask([open_run(url_of(name, store)) for name in names], sql), format.value)


class BetweenSides(TyperCommand):
    """Lets a command see the first ``--`` of its arguments, which click takes out."""

    # the base class wants the context of the click that typer brings with it, or of another one, by typer's version
    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if "--" in args:
            args[args.index("--")] = SIDES
        return super().parse_args(ctx, args)


def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="A B | A1 A2... -- B1 B2...",
            help="the run to compare with, and the run to judge against it: names or full URLs; or the runs of two "
            "settings, with other seeds, and -- between them",
            autocompletion=run_names,
        ),
    ],
    store: Store = DEFAULT_STORE,
    at_least: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="exit with 1 if the whole interval is below X (B is confidently worse than A + X) or if the rewards "
            "differ, else with 0",
        ),
    ] = None,
    flips: Annotated[
        int, typer.Option(help="how many of the prompts that only one run solves to show, if there are two", min=0)
    ] = 5,
    format: Annotated[DocumentFormat, typer.Option(help="output format")] = DocumentFormat.table,
) -> None:
    """Compare the scores of two runs on the same prompts, or of two settings with several runs each.

    B minus A, with intervals (95 %), and a verdict about the last validation of all. The interval of two runs covers
    the noise of the prompts, and is about their policies; that of several runs a side covers the luck of seeds, too,
    and is about their settings.
    """
    from ratchet.flows.commands import comparison_tables
    from ratchet.infra.runs.comparison import Comparison
    from ratchet.infra.runs.comparison import compare as compared
    from ratchet.infra.runs.run import open_run
    from ratchet.infra.runs.settings_comparison import SettingsComparison, compare_settings

    comparison: Comparison | SettingsComparison
    if SIDES in names:
        at = names.index(SIDES)
        a, b = ([open_run(url_of(name, store)) for name in side] for side in (names[:at], names[at + 1 :]))
        comparison = compare_settings(a, b)
        comparison_tables.show_settings(console, comparison, at_least, format.value)
    elif len(names) == 2:
        comparison = compared(*(open_run(url_of(name, store)) for name in names))
        comparison_tables.show(console, comparison, flips, at_least, format.value)
    else:
        raise UserError(
            f"compare {' '.join(names)}: name two runs, or the runs of two settings with -- between them "
            "(`ratchet compare A1 A2 A3 -- B1 B2 B3`)"
        )
    if at_least is not None and comparison.falls_short(at_least):
        raise typer.Exit(1)


def ui(
    store: Store = DEFAULT_STORE,
    host: Annotated[
        str, typer.Option(help="address to listen on; others than loopback show the runs to the network")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(help="port to listen on; 0: any free one", min=0, max=65535)] = 8265,
) -> None:
    """Serve a page that shows the runs of a store while they run, and their trajectories, until Ctrl-C."""
    from ratchet.flows.ui.server import serve
    from ratchet.infra.progress import Event, Note, listening

    def say(event: Event) -> None:
        if isinstance(event, Note):
            console.print(visible(event.text), highlight=False)

    with listening(say):
        serve(store, host, port, lambda url: console.print(f"the runs of {store} are shown at {url}", highlight=False))


def report(
    names: Names,
    output: Annotated[Path, typer.Option("--output", "-o", help="the HTML file to write or replace")],
    store: Store = DEFAULT_STORE,
) -> None:
    """Write the page of `ratchet ui` into one HTML file: curves, configs, and a sample of the runs' trajectories."""
    from ratchet.flows import report as html
    from ratchet.flows.terminal import progress
    from ratchet.infra.runs.run import open_run

    with progress(console):
        html.write([open_run(url_of(name, store)) for name in names], output)
    console.print(f"the report is in {output}")


def vacuum(
    name: Name,
    store: Store = DEFAULT_STORE,
    take_over: Annotated[bool, typer.Option("--take-over", help="continue even if a driver is alive")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only list what would be deleted")] = False,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="only list files in the run's folder that Ratchet did not write")
    ] = False,
) -> None:
    """Delete files that Ratchet wrote and no commit or fork references; never a log record."""
    from ratchet.infra.runs import vacuum as broom
    from ratchet.infra.runs.run import open_run

    run = open_run(url_of(name, store))
    if foreign:
        others = broom.foreign(run.store)
        for key in others:
            console.print(visible(key), highlight=False)
        console.print(f"{counted(len(others), 'file')} that Ratchet did not write and never deletes")
        return
    if take_over and not run.is_fit:
        run.config.require_own("does not take it over", "end that trainer's own process first")
    doomed = broom.unreached(run.store) if dry_run else broom.vacuum(run.store, take_over)
    for key in doomed:
        console.print(visible(key), highlight=False)
    console.print(f"{counted(len(doomed), 'file')} {'to delete' if dry_run else 'deleted'}")


def verify(
    name: Name,
    store: Store = DEFAULT_STORE,
    repair: Annotated[
        bool, typer.Option("--repair", help="rewrite damaged files that only copy data from the log")
    ] = False,
) -> None:
    """Check the whole run: read its log and every object that the log names, and report damage and how to fix it."""
    from ratchet.flows.commands import tables
    from ratchet.flows.terminal import progress
    from ratchet.infra.runs.verify import verify as examine
    from ratchet.infra.store.run_store import RunStore

    run_store = RunStore.at(url_of(name, store))
    with progress(console):
        findings = list(examine(run_store))
    repaired = [finding for finding in findings if repair and finding.repair is not None]
    for finding in repaired:
        assert finding.repair is not None
        finding.repair()
    tables.findings(console, [finding for finding in findings if finding not in repaired])
    for finding in repaired:
        console.print(f"{finding.key} {finding.what}: repaired", highlight=False)
    wrong = [finding for finding in findings if not finding.harmless]
    if wrong:
        have = "has an error" if len(wrong) == 1 else "have errors"
        raise RatchetError(f"{counted(len(wrong), 'file')} of {name} {have}: {wrong[0].key} {wrong[0].what}")
    console.print(f"{name} is intact")
