"""Commands that make runs from runs: fork, sweep, relabel, rescore."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import JsonValue

from ratchet.flows.commands.console import console
from ratchet.flows.commands.options import (
    DEFAULT_STORE,
    Image,
    JobVariables,
    Name,
    Overrides,
    Store,
    TrustCode,
    parse_job_variables,
    url_of,
)
from ratchet.flows.commands.starting import (
    drive_run,
    fit,
    needs_server,
    silence_prefect,
    start_server,
    stop_early,
    train_to_the_end,
)
from ratchet.flows.terminal import visible
from ratchet.rlhf.config import JudgeConfig, RunConfig, overridden, validated
from ratchet.rlhf.errors import RatchetError, UserError, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ratchet.flows.sweep import Sweep


class Pruner(StrEnum):
    halving = "halving"
    median = "median"
    none = "none"


def fork(
    name: Name,
    run: Annotated[str, typer.Option(help="the new run's name")],
    at: Annotated[
        str | None,
        typer.Option(
            metavar="K[:STAGE]",
            help="where the fork begins: an iteration, and the first of its stages that is not shared; with "
            "--trajectory by default that of the trajectory",
        ),
    ] = None,
    trajectory: Annotated[
        str | None,
        typer.Option(metavar="ID", help="continue this trajectory of RUN in the fork's first iteration, its only one"),
    ] = None,
    turn: Annotated[
        int | None, typer.Option(help="with --trajectory: turns of the policy that are kept", min=1)
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="with --trajectory: continuations; by default rollout.n of RUN", min=1)
    ] = None,
    overrides: Overrides = None,
    store: Store = DEFAULT_STORE,
    to_store: Annotated[str | None, typer.Option(help="store of the new run; by default that of RUN")] = None,
    trust_code: TrustCode = False,
) -> None:
    """Create a run that shares the commits of another run up to a point, without copies, and has its own config.

    With --trajectory and --turn the point is within a trajectory: the new run's first iteration continues it after that
    turn, with the policy that wrote it, and the new run ends. train.iterations=N goes on.
    """
    from ratchet.infra.runs.run import open_run

    place = _place(at) if at is not None else None
    if trajectory is None and (turn is not None or samples is not None):
        raise UserError("--turn and --samples are about the trajectory that is continued: name it with --trajectory")
    if trajectory is not None and (turn is None or (place is not None and place[1] is not None)):
        raise UserError(
            f"--trajectory {trajectory} needs --turn, the number of its turns to keep"
            if turn is None
            else f"--at {at}: a trajectory is continued by a whole iteration: name no stage"
        )
    parent = open_run(url_of(name, store))
    target_store = to_store or parent.store.url.rpartition("/")[0]
    values = {"run.name": run, "run.store": target_store}
    elsewhere = "" if target_store == DEFAULT_STORE else f" --store {target_store}"
    if trajectory is not None and turn is not None:
        from ratchet.tasks.analysis.branch import Branch, branch_run

        branch = Branch(trajectory, turn, samples, None if place is None else place[0])
        config = branch_run(parent, branch, values, overrides or [])
        said = f"{run} continues {trajectory} after turn {turn}, {counted(config.rollout.n, 'time')}"
        console.print(f"{said}; `ratchet resume {run}{elsewhere}` draws them", markup=False)
        return
    if place is None:
        raise UserError("name where the fork begins: --at K, --at K:STAGE, or --trajectory ID --turn K")
    from ratchet.tasks.analysis.plan import fork_run

    fork_run(parent, parent.config.with_values(values, overrides or []), *place)
    console.print(f"{run} shares {name} up to {at}; `ratchet resume {run}{elsewhere}` continues it")


def sweep(
    name: Name,
    at: Annotated[
        str,
        typer.Option(
            metavar="K[:STAGE]",
            help="where the arms begin: an iteration; its first stages are shared, as far as the settings allow",
        ),
    ],
    vary: Annotated[
        list[str], typer.Option(metavar="KEY=A,B,C", help="a key of the config and its values; repeatable")
    ],
    run: Annotated[str | None, typer.Option(help="the sweep's name; by default RUN-sweep")] = None,
    iterations: Annotated[
        int | None, typer.Option(help="iterations of an arm; by default the run's train.iterations", min=1)
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="metric of the validation; by default validation.metric, or the first one")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="number of arms, drawn by Optuna's TPE; by default all combinations", min=1)
    ] = None,
    screen: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:END",
            help="drop arms before they start, by `whatif` on these iterations of RUN, without END; by default none",
        ),
    ] = None,
    pruner: Annotated[
        Pruner, typer.Option(help="what stops arms that fall behind: successive halving, the median, or nothing")
    ] = Pruner.halving,
    pool: Annotated[
        str | None,
        typer.Option(help="train the arms on workers of this Prefect work pool; by default in this process"),
    ] = None,
    image: Image = None,
    job_variables: JobVariables = None,
    parallel: Annotated[
        int, typer.Option(help="arms at a time, on a pool; those that fall behind are stopped together", min=1)
    ] = 1,
    store: Store = DEFAULT_STORE,
    trust_code: TrustCode = False,
) -> None:
    """Try several settings from one point of a run: forks that share everything before it.

    The same command continues a sweep that was killed.
    """
    if pool is not None:
        needs_server()
    elif parallel > 1:
        raise UserError(
            f"--parallel {parallel} needs --pool NAME, whose workers train the arms: `ratchet worker --pool NAME` "
            "starts one on this machine"
        )
    from ratchet.infra.runs.run import open_run

    iteration, stage = _place(at)
    silence_prefect()
    from ratchet.flows import sweep as arms_of
    from ratchet.tasks.analysis.whatif import parse_iterations

    parent = open_run(url_of(name, store))
    parent.config.require_own("cannot sweep it")
    tried = arms_of.Sweep(
        parent=parent.store.url,
        name=run or f"{parent.store.url.rpartition('/')[2]}-sweep",
        iteration=iteration,
        stage=stage,
        vary=arms_of.parse_vary(vary),
        iterations=parent.config.iterations if iterations is None else iterations,
        metric=metric,
        trials=trials,
        pruner=pruner.value,
        screen=None if screen is None else (parse_iterations(screen).start, parse_iterations(screen).stop),
        parallel=parallel,
    )

    def say(text: str) -> None:
        console.print(visible(text), highlight=False)

    from ratchet.infra.execution.stopping import on_signals

    with on_signals(stop_early):
        trainer = _trainer(tried, pool, image, parse_job_variables(job_variables), say)
        arms = list(arms_of.run_arms(tried, trainer, say))
    from ratchet.flows.commands import tables

    tables.arms(console, arms, arms_of.write_page(tried, arms))


def _trainer(
    tried: Sweep, pool: str | None, image: str | None, job_variables: dict[str, JsonValue], say: Callable[[str], None]
) -> Callable[[Sequence[RunConfig]], None]:
    """Starts a sweep; returns the function that trains its arms, in this process or on a pool."""
    from ratchet.flows import sweep as arms_of

    if pool is not None:
        from ratchet.flows.deploy import WorkPool, prepare
        from ratchet.flows.prefect_pool import Pool

        where = WorkPool(pool, image=image, job_variables=job_variables)
        prepare(where)
        arms_of.begin(tried)
        return Pool(where, tried.name, say).train
    arms_of.begin(tried)
    server = start_server()

    def train_here(configs: Sequence[RunConfig]) -> None:
        for config in configs:
            train_to_the_end(config, server)

    return train_here


def relabel(
    name: Name,
    run: Annotated[str, typer.Option(help="name of this round of labels; its fit is NAME-fit, and its fork NAME-run")],
    pairs: Annotated[int, typer.Option(help="largest number of pairs to label", min=2)] = 64,
    window: Annotated[
        int | None, typer.Option(help="newest iterations to choose pairs from; by default all", min=1)
    ] = None,
    labels: Annotated[
        str | None, typer.Option(help="the labels: rows of pair_id and preferred, or Label Studio's JSON export")
    ] = None,
    judge: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="ask a judge for the labels: url, model, and others of reward.judge; repeatable",
        ),
    ] = None,
    held_out: Annotated[
        float, typer.Option(help="share of the labelled prompts on which the models are compared", min=0.01, max=0.9)
    ] = 0.2,
    also: Annotated[
        list[str] | None, typer.Option(help="more preferences to learn from, such as those before; repeatable")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="folder of the new reward model; by default NAME-model")] = None,
    iterations: Annotated[
        int | None, typer.Option(help="iterations of the fork; by default the run's train.iterations", min=1)
    ] = None,
    store: Store = DEFAULT_STORE,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings of the fit, such as lr=1e-5 epochs=2")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Improve a run's reward model with labels of the pairs that it is least sure of, and fork the run with it.

    The first call writes the pairs, as a table and for Label Studio. The same command with --labels or --judge
    continues the training of the reward model, refuses the new one (exit code 1) if it ranks held-out pairs worse than
    the old one, and drives a fork of the run that it scores. A command that was killed continues when it is repeated.
    """
    from ratchet.infra.runs.run import open_run

    if labels is not None and judge:
        raise UserError("--labels and --judge both give labels: give only one")
    asked = None if not judge else validated(JudgeConfig, overridden({}, judge, JudgeConfig), "--judge")
    silence_prefect()
    from ratchet.flows import relabel as rounds

    parent = open_run(url_of(name, store))
    relabelled = rounds.Relabel(
        parent=parent.store.url,
        name=run,
        pairs=pairs,
        window=window,
        held_out=held_out,
        also=tuple(also or ()),
        output=str((output or Path(f"{run}-model")).resolve()),
    )
    chosen = rounds.begin(relabelled)
    config = rounds.refit_config(relabelled, overrides or [])
    from ratchet.flows.terminal import progress

    with progress(console):
        known = rounds.label(relabelled, chosen, labels, asked)
    if known is None:
        console.print(
            f"{counted(len(chosen.table), 'pair')} to label in {chosen.url}\n"
            f"  {rounds.PAIRS}    set preferred to a, b or tie for each pair_id, in a file of your own; or\n"
            f"  {rounds.TASKS}, {rounds.INTERFACE}    import the tasks into Label Studio with this interface\n"
            "repeat the command with --labels FILE, or with --judge url=URL --judge model=MODEL",
            highlight=False,
        )
        return
    divided = rounds.split(relabelled, chosen, known)
    ties = sum(preferred == "tie" for preferred in known.preferred.values())
    more = f" and {divided.also} of --also" if relabelled.also else ""
    left_out = f" ({divided.left_out} of --also left out: their prompts are held out)" if divided.left_out else ""
    console.print(
        f"{counted(len(known.preferred), 'label')}, {counted(ties, 'tie')}, {known.skipped} without a label: "
        f"{divided.learned} pairs{more} to learn from, {divided.held_out} held out{left_out}",
        highlight=False,
    )
    verdict = rounds.judge_new_model(relabelled, config, fit(config))
    console.print(
        f"the new reward model ranks {verdict.new:.1%} of {counted(verdict.pairs, 'held-out pair')} as labelled, "
        f"the old one {verdict.old:.1%}",
        highlight=False,
    )
    if verdict.is_worse:
        raise RatchetError(
            f"the new reward model is worse than the old one, so {name} is not forked: label more pairs under another "
            "name (--run), or change the settings of the fit"
        )
    train_to_the_end(rounds.fork_config(relabelled, iterations), start_server())


def rescore(
    name: Name,
    run: Annotated[str, typer.Option(help="the new run's name")],
    reward: Annotated[
        str | None,
        typer.Option(help="a built-in reward, package.module:function or file.py:function; or set reward.model=PATH"),
    ] = None,
    store: Store = DEFAULT_STORE,
    learn: Annotated[
        bool, typer.Option("--train", help="also train on the new scores, off-policy with a correction")
    ] = False,
    overrides: Overrides = None,
    trust_code: TrustCode = False,
) -> None:
    """Score the generations of a run again, in a new run, and compare the scores; nothing is generated."""
    silence_prefect()
    from ratchet.flows.commands import tables
    from ratchet.flows.rescore import begin, rescoring_config
    from ratchet.infra.execution.claims import run_url
    from ratchet.infra.runs.run import open_run

    source = url_of(name, store)
    config = rescoring_config(source, run, reward, learn, overrides or [])
    begin(config)
    drive_run(config)
    tables.compare_scores(console, open_run(source), open_run(run_url(config.run.store, run)))


def _place(at: str) -> tuple[int, str | None]:
    """Splits the value of ``--at`` into iteration and stage."""
    iteration, _, stage = at.partition(":")
    if not iteration.isdigit():
        raise UserError(f"--at {at}: write an iteration, such as 7, or an iteration and a stage, such as 7:score")
    return int(iteration), stage or None
