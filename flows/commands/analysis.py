"""Commands that explain results or predict them: bisect, plan, explain, reproduce, whatif."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ratchet.flows.commands.console import console, errors
from ratchet.flows.commands.options import (
    DEFAULT_STORE,
    DocumentFormat,
    Name,
    Overrides,
    RoleOption,
    Store,
    TreeFormat,
    TrustCode,
    run_argument,
    run_names,
    url_of,
)
from ratchet.flows.commands.starting import silence_prefect
from ratchet.rlhf import consent
from ratchet.rlhf.config import load_config
from ratchet.rlhf.errors import RatchetError, UserError


def bisect(
    name: Name,
    reward: Annotated[
        str,
        typer.Option(help="the stricter reward: a built-in one, package.module:function or file.py:function"),
    ],
    overrides: Overrides = None,
    store: Store = DEFAULT_STORE,
    examples: Annotated[int, typer.Option(help="how many trajectories to show", min=0)] = 3,
    more: Annotated[
        int, typer.Option(help="how many iterations to score beyond the search, to narrow its interval", min=0)
    ] = 0,
    trust_code: TrustCode = False,
) -> None:
    """Find the iteration in which the policy began to exploit its reward, by scoring committed generations again.

    The stricter reward should be on the scale of the run's own. Nothing is generated or written, and only the
    iterations that a binary search needs are scored. It says how sure it is, as an interval of iterations.
    """
    silence_prefect()
    from ratchet.flows.commands import tables
    from ratchet.flows.terminal import progress
    from ratchet.infra.runs.run import open_run
    from ratchet.tasks.analysis.bisect import bisect as search

    run = open_run(url_of(name, store))
    with progress(console):
        rescored, found = search(run, reward, overrides or [], more)
    again = shlex.join(["ratchet", "bisect", run_argument(run.store.url), "--reward", reward, *(overrides or [])])
    tables.hack(console, run, rescored, found, reward, examples, again, more)


def plan(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CONFIG.yaml",
            help="a run, whose config is changed; or a changed config",
            autocompletion=run_names,
        ),
    ],
    overrides: Overrides = None,
    run: Annotated[str | None, typer.Option(help="with CONFIG.yaml: the run's name; by default run.name")] = None,
    store: Annotated[str | None, typer.Option(envvar="RATCHET_STORE", help="folder of runs (run.store)")] = None,
    iteration: Annotated[
        int | None, typer.Option(min=0, help="the iteration; by default the open one, or the last with a commit")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """List the stages of an iteration that a changed config would run again, and why."""
    from ratchet.flows.commands import tables
    from ratchet.infra.execution.claims import run_url
    from ratchet.infra.runs.run import open_run

    if Path(source).suffix in (".yaml", ".yml"):
        changed = load_config(source, overrides or [])
        consent.give(changed)
        name = run or changed.run.name
        committed = open_run(run_url(store or changed.run.store, name))
    elif run is not None:
        raise UserError(
            f"plan {source} --run {run}: --run goes with a CONFIG.yaml, and {source} names a run: leave it out"
        )
    else:
        committed = open_run(url_of(source, store or DEFAULT_STORE))
        name, changed = source, committed.config.with_values({}, overrides or [])
    tables.plan(console, committed, changed, iteration, name)


def explain(
    name: Name,
    checkpoint: Annotated[
        int, typer.Argument(metavar="CHECKPOINT", min=0, help="the number of iterations that made the weights")
    ],
    store: Store = DEFAULT_STORE,
    role: RoleOption = "actor",
    format: Annotated[TreeFormat, typer.Option(help="output format")] = TreeFormat.tree,
) -> None:
    """Show the lineage of a checkpoint: the updates, shards, configs, seeds and code that produced it."""
    from ratchet.flows.commands import tables
    from ratchet.infra.runs.run import open_run
    from ratchet.tasks.analysis.explain import explain as lineage

    tables.lineage(console, lineage(open_run(url_of(name, store)), checkpoint, role), format.value)


def reproduce(
    name: Name,
    iteration: Annotated[int, typer.Option(min=0, help="the iteration to compute again")],
    store: Store = DEFAULT_STORE,
    trust_code: TrustCode = False,
) -> None:
    """Compute an iteration's committed stages again, and name the first one that differs. Nothing is written."""
    from ratchet.flows.terminal import progress
    from ratchet.infra.runs.run import open_run
    from ratchet.tasks.analysis.reproduce import reproduce as recompute

    differs = None
    with progress(console):
        for reproduced in recompute(open_run(url_of(name, store)), iteration):
            console.print(
                f"{reproduced.stage}: {'the same' if reproduced.same else reproduced.difference}", highlight=False
            )
            differs = differs or (None if reproduced.same else reproduced.stage)
    if differs is not None:
        raise RatchetError(
            f"iteration {iteration} differs from the committed one, first in {differs}; the last bits of a result also "
            "depend on the engine, packages and threads (OMP_NUM_THREADS, which `ratchet demo countdown` sets to 1)"
        )
    console.print(f"iteration {iteration} is bit-identical to the committed one")


def whatif(
    name: Name,
    settings: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="KEY=VALUE", help="an alternative: one setting, or several in quotes; repeatable"
        ),
    ],
    iterations: Annotated[
        str | None,
        typer.Option(metavar="FIRST:END", help="iterations, without END, such as 5:15; by default the newest"),
    ] = None,
    store: Store = DEFAULT_STORE,
    format: Annotated[DocumentFormat, typer.Option(help="output format")] = DocumentFormat.table,
    trust_code: TrustCode = False,
) -> None:
    """Compute updates again under other settings of reward, algorithm and actor, from the stored trajectories.

    Nothing is generated or written. Each alternative is compared with the update that the run made.
    """
    silence_prefect()
    from ratchet.flows.commands import tables
    from ratchet.flows.terminal import progress
    from ratchet.infra.runs.run import open_run
    from ratchet.tasks.analysis import whatif as judge

    run, arms = open_run(url_of(name, store)), judge.parse_arms(settings)
    chosen = judge.newest(run) if iterations is None else judge.parse_iterations(iterations)
    with progress(errors if format is DocumentFormat.json else console):
        results = list(judge.whatif(run, chosen, arms))
    tables.what_if(console, results, format.value)
