"""The command line, `ratchet`. Each command checks its input, starts a flow or opens a run, and prints the result."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO
from urllib.parse import urlsplit

import typer
from rich.console import Console

from ratchet.flows.commands.convert import convert
from ratchet.flows.commands.data import data, make_folder, whole_short_help
from ratchet.flows.commands.dataset import dataset
from ratchet.flows.commands.run_arguments import DEFAULT_STORE, Name, Names, Store, run_names, url_of
from ratchet.flows.temporary_server import TemporaryServer
from ratchet.flows.terminal import visible
from ratchet.rlhf import consent
from ratchet.rlhf.config import (
    JudgeConfig,
    RewardTraining,
    RunConfig,
    SFTConfig,
    keys,
    load_config,
    overridden,
    validated,
)
from ratchet.rlhf.config.older import RenamedKey
from ratchet.rlhf.errors import RatchetError, UserError, counted, reached

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ratchet.flows.sweep import Sweep
    from ratchet.infra.runs.run import Run

app = typer.Typer(
    name="ratchet",
    help="Reinforcement learning for language models as a workflow: every stage is committed and can be resumed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data, name="data")
app.command(context_settings={"ignore_unknown_options": True})(convert)  # those of the other program
app.command()(dataset)

console = Console(soft_wrap=True, markup=False)
errors = Console(stderr=True, soft_wrap=True, markup=False)


Overrides = Annotated[list[str] | None, typer.Argument(metavar="a.b=c", help="values of the config to change")]
TakeOver = Annotated[
    bool, typer.Option("--take-over", help="continue even if another driver is alive, which is then shut out")
]
AcceptChanges = Annotated[
    bool,
    typer.Option("--accept-changes", help="continue the run with other data, another reward or another algorithm"),
]


def _trusting(context: typer.Context, is_set: bool) -> None:
    if is_set:
        context.with_resource(consent.trusting())


TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        callback=_trusting,
        help="run the code that the run's config names (rewards, environments, tools, agents, models), although it "
        "has not run on this machine before; RATCHET_TRUST_CODE=1 does the same",
    ),
]
Iteration = Annotated[int | None, typer.Option(help="the snapshot after this many iterations; by default the newest")]
Best = Annotated[bool, typer.Option("--best", help="the snapshot with the best validation")]
Adapter = Annotated[bool, typer.Option("--adapter", help="only the adapter (model.lora), in PEFT's format")]


class Format(StrEnum):
    table = "table"
    json = "json"
    csv = "csv"
    md = "md"


class TreeFormat(StrEnum):
    tree = "tree"
    json = "json"


class DocumentFormat(StrEnum):
    table = "table"
    json = "json"


class Api(StrEnum):
    vllm = "vllm"
    sglang = "sglang"
    tgi = "tgi"


class Pruner(StrEnum):
    halving = "halving"
    median = "median"
    none = "none"


class Role(StrEnum):
    actor = "actor"
    critic = "critic"
    ema = "ema"


def main() -> None:
    """Run a command. A `RatchetError` is printed, a line per mistake, and decides the exit code."""
    sys.path.append(str(Path.cwd()))  # so that reward functions beside the config can be imported
    # transformers imports DeepSpeed when it saves a model, and DeepSpeed then warns that there is no GPU
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    warnings.showwarning = _show_warning
    try:
        app(prog_name="ratchet")  # however it was started: completion asks by this name
    except RatchetError as error:
        for line in str(error).splitlines():
            errors.print(f"error: {visible(line)}", highlight=False)
        sys.exit(error.exit_code)


_show_other_warnings = warnings.showwarning


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, RenamedKey):
        errors.print(f"note: {message}", highlight=False)
    else:
        _show_other_warnings(message, category, filename, lineno, file, line)


def _config_keys() -> str:
    rows = [f"{key} = {default}   {meaning} ({kind})" for key, kind, default, meaning in keys(RunConfig)]
    return "\b\nKeys of the config, as a.b=c overrides or sections of the YAML file:\n" + "\n".join(rows)


@app.command(epilog=_config_keys() if "--help" in sys.argv else None)
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="the run's config")],
    overrides: Overrides = None,
    run: Annotated[str | None, typer.Option(help="the run's name (run.name)")] = None,
    store: Annotated[str | None, typer.Option(envvar="RATCHET_STORE", help="folder of runs (run.store)")] = None,
    take_over: TakeOver = False,
    accept_changes: AcceptChanges = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check everything, say what would happen, and stop")
    ] = False,
) -> None:
    """Start a run, or resume it if it exists."""
    given = {"run.name": run, "run.store": store}
    values = {key: value for key, value in given.items() if value}
    loaded = load_config(config, overrides or []).with_values(values)
    if dry_run:
        _announce(loaded, accept_changes)
    else:
        _drive(loaded, take_over, accept_changes)


@app.command()
def resume(
    name: Name,
    store: Store = DEFAULT_STORE,
    take_over: TakeOver = False,
    accept_changes: AcceptChanges = False,
    trust_code: TrustCode = False,
) -> None:
    """Resume from the last committed stage, with the config of the last driver."""
    from ratchet.infra.runs.run import open_run

    url = url_of(name, store)
    parent, _, leaf = url.rpartition("/")  # where the run was opened, which may differ from its config
    stored = open_run(url).config
    consent.require(stored)
    _drive(stored.with_values({"run.store": parent, "run.name": leaf}), take_over, accept_changes)


@app.command()
def stop(name: Name, store: Store = DEFAULT_STORE) -> None:
    """Ask the run's driver to stop, wait until it has, and end its workers on Ray."""
    import time

    from ratchet.infra.execution import heartbeat
    from ratchet.infra.runs.run import open_run
    from ratchet.infra.workers.ray_group import end_idle

    run = open_run(url_of(name, store))
    beat = heartbeat.is_alive(run.store.objects, lambda text: console.print(text))
    if beat is None:
        ended = not run.is_fit and end_idle(run.config, run.store.url)
        workers = "its workers on Ray have ended" if ended else "nothing to stop"
        console.print(f"{name} has no live driver; {workers}")
        return
    run.store.objects.put(heartbeat.stop_key(beat.term), b"{}")
    console.print(f"asked the driver (pid {beat.pid} on {beat.host}) to stop")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(1)
        if heartbeat.is_alive(run.store.objects) is None:
            resume_with = "the command that started it" if run.is_fit else f"`ratchet resume {name}`"
            if not run.is_fit:
                end_idle(run.config, run.store.url)
            console.print(f"{name} has stopped; {resume_with} continues from the last commit")
            return
    raise RatchetError(
        f"the driver of {name} has not stopped within 60 s and may hang: kill pid {beat.pid} on {beat.host}"
    )


@app.command()
def status(
    name: Name,
    store: Store = DEFAULT_STORE,
    last: Annotated[int, typer.Option(help="iterations to show", min=1)] = 10,
) -> None:
    """Show the stages (committed, running, missing) and metrics of the last iterations."""
    from ratchet.flows.commands import tables
    from ratchet.infra.runs.run import open_run

    tables.status(console, open_run(url_of(name, store)), last)


@app.command()
def ls(
    store: Store = DEFAULT_STORE,
    format: Annotated[Format, typer.Option(help="output format")] = Format.table,
) -> None:
    """List the runs of a store: state, iterations, best validation, age, size."""
    from ratchet.flows.commands import tables
    from ratchet.infra.runs.listing import runs_of
    from ratchet.infra.runs.run import check_store

    summaries = runs_of(store)
    if not summaries:
        check_store(store)
    tables.runs(console, summaries, store, format.value)


@app.command()
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
) -> None:
    """Show trajectories, with the columns of all stages."""
    from ratchet.flows.commands import tables
    from ratchet.infra.runs.run import open_run

    tables.show(console, open_run(url_of(name, store)), iteration, where, columns, limit, format.value, full)


@app.command()
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


@app.command()
def compare(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="the run to compare with: a name or a full URL", autocompletion=run_names),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="the run to judge against A", autocompletion=run_names)],
    store: Store = DEFAULT_STORE,
    at_least: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="exit with 1 if the whole interval is below X (B is confidently worse than A + X) or if the rewards "
            "differ, else with 0",
        ),
    ] = None,
    flips: Annotated[int, typer.Option(help="how many of the prompts that only one run solves to show", min=0)] = 5,
    format: Annotated[DocumentFormat, typer.Option(help="output format")] = DocumentFormat.table,
) -> None:
    """Compare the scores of two runs on the same prompts: B minus A, with intervals, and a verdict.

    The verdict is about the last validation of both. Its interval (95 %) holds the noise of the prompts and that of
    training, as the validations before it show it.
    """
    from ratchet.flows.commands import comparison_output
    from ratchet.infra.runs.comparison import compare as compared
    from ratchet.infra.runs.run import open_run

    comparison = compared(open_run(url_of(a, store)), open_run(url_of(b, store)))
    comparison_output.show(console, comparison, flips, at_least, format.value)
    if at_least is not None and comparison.falls_short(at_least):
        raise typer.Exit(1)


@app.command()
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


@app.command()
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


@app.command()
def fork(
    name: Name,
    at: Annotated[
        str,
        typer.Option(
            metavar="K[:STAGE]",
            help="where the fork begins: an iteration, and the first of its stages that is not shared",
        ),
    ],
    run: Annotated[str, typer.Option(help="the new run's name")],
    overrides: Overrides = None,
    store: Store = DEFAULT_STORE,
    to_store: Annotated[str | None, typer.Option(help="store of the new run; by default that of RUN")] = None,
    trust_code: TrustCode = False,
) -> None:
    """Create a run that shares the commits of another run up to a point, without copies, and has its own config."""
    from ratchet.infra.runs.run import open_run
    from ratchet.tasks.analysis.plan import fork_run

    parent = open_run(url_of(name, store))
    target_store = to_store or parent.store.url.rpartition("/")[0]
    config = parent.config.with_values({"run.name": run, "run.store": target_store}, overrides or [])
    fork_run(parent, config, *_place(at))
    elsewhere = "" if target_store == DEFAULT_STORE else f" --store {target_store}"
    console.print(f"{run} shares {name} up to {at}; `ratchet resume {run}{elsewhere}` continues it")


@app.command()
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
    pruner: Annotated[
        Pruner, typer.Option(help="what stops arms that fall behind: successive halving, the median, or nothing")
    ] = Pruner.halving,
    pool: Annotated[
        str | None,
        typer.Option(help="train the arms on workers of this Prefect work pool; by default in this process"),
    ] = None,
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
        _needs_server()
    elif parallel > 1:
        raise UserError(
            f"--parallel {parallel} needs --pool NAME, whose workers train the arms: `ratchet worker --pool NAME` "
            "starts one on this machine"
        )
    from ratchet.infra.runs.run import open_run

    iteration, stage = _place(at)
    _quiet()
    from ratchet.flows import sweep as arms_of

    parent = open_run(url_of(name, store))
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
        parallel=parallel,
    )

    def say(text: str) -> None:
        console.print(visible(text), highlight=False)

    from ratchet.infra.execution.stopping import on_signals

    with on_signals(_stop_early):
        arms = list(arms_of.run_arms(tried, _trainer(tried, pool, say), say))
    from ratchet.flows.commands import tables

    tables.arms(console, arms, arms_of.write_page(tried, arms))


def _trainer(tried: Sweep, pool: str | None, say: Callable[[str], None]) -> Callable[[Sequence[RunConfig]], None]:
    """Begin a sweep; returns what trains its arms, in this process or on a pool."""
    from ratchet.flows import sweep as arms_of

    if pool is not None:
        from ratchet.flows.pool import Pool, check_server

        check_server()
        arms_of.begin(tried)
        return Pool(pool, tried.name, say).train
    arms_of.begin(tried)
    server = _starting()

    def train_here(configs: Sequence[RunConfig]) -> None:
        for config in configs:
            _train_to_the_end(config, server)

    return train_here


@app.command()
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
    _quiet()
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
    verdict = rounds.judge_new_model(relabelled, config, _fit(config))
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
    _train_to_the_end(rounds.fork_config(relabelled, iterations), _starting())


def _place(at: str) -> tuple[int, str | None]:
    """The iteration and the stage that ``--at`` names."""
    iteration, _, stage = at.partition(":")
    if not iteration.isdigit():
        raise UserError(f"--at {at}: write an iteration, such as 7, or an iteration and a stage, such as 7:score")
    return int(iteration), stage or None


@app.command()
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
    _quiet()
    from ratchet.flows.commands import tables
    from ratchet.flows.rescore import begin, rescoring_config
    from ratchet.infra.execution.claims import run_url
    from ratchet.infra.runs.run import open_run

    source = url_of(name, store)
    config = rescoring_config(source, run, reward, learn, overrides or [])
    begin(config)
    _drive(config)
    tables.compare_scores(console, open_run(source), open_run(run_url(config.run.store, run)))


@app.command()
def bisect(
    name: Name,
    reward: Annotated[
        str,
        typer.Option(help="the stricter reward: a built-in one, package.module:function or file.py:function"),
    ],
    overrides: Overrides = None,
    store: Store = DEFAULT_STORE,
    examples: Annotated[int, typer.Option(help="how many trajectories to show", min=0)] = 3,
    trust_code: TrustCode = False,
) -> None:
    """Find the iteration in which the policy began to exploit its reward, by scoring committed generations again.

    The stricter reward should be on the scale of the run's own. Nothing is generated or written, and only the
    iterations that a binary search needs are scored.
    """
    _quiet()
    from ratchet.flows.commands import tables
    from ratchet.flows.terminal import progress
    from ratchet.infra.runs.run import open_run
    from ratchet.tasks.analysis.bisect import bisect as search

    run = open_run(url_of(name, store))
    with progress(console):
        rescored, found = search(run, reward, overrides or [])
    tables.hack(console, run, rescored, found, reward, examples)


@app.command()
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


@app.command()
def explain(
    name: Name,
    checkpoint: Annotated[
        int, typer.Argument(metavar="CHECKPOINT", min=0, help="the number of iterations that made the weights")
    ],
    store: Store = DEFAULT_STORE,
    role: Annotated[
        Role, typer.Option(help="the model: actor (the policy), critic, or ema (the actor's moving average)")
    ] = Role.actor,
    format: Annotated[TreeFormat, typer.Option(help="output format")] = TreeFormat.tree,
) -> None:
    """Show the lineage of a checkpoint: the updates, shards, configs, seeds and code that produced it."""
    from ratchet.flows.commands import tables
    from ratchet.infra.runs.run import open_run
    from ratchet.tasks.analysis.explain import explain as lineage

    tables.lineage(console, lineage(open_run(url_of(name, store)), checkpoint, role.value), format.value)


@app.command()
def replay(
    name: Name,
    iteration: Annotated[int, typer.Option(min=0, help="the iteration to compute again")],
    store: Store = DEFAULT_STORE,
    trust_code: TrustCode = False,
) -> None:
    """Compute an iteration's committed stages again, and name the first one that differs. Nothing is written."""
    from ratchet.flows.terminal import progress
    from ratchet.infra.runs.run import open_run
    from ratchet.tasks.analysis.replay import replay as recompute

    differs = None
    with progress(console):
        for replayed in recompute(open_run(url_of(name, store)), iteration):
            console.print(f"{replayed.stage}: {'the same' if replayed.same else replayed.difference}", highlight=False)
            differs = differs or (None if replayed.same else replayed.stage)
    if differs is not None:
        raise RatchetError(
            f"iteration {iteration} differs from the committed one, first in {differs}; the last bits of a result "
            "also depend on the engine, packages and number of threads (OMP_NUM_THREADS, which `make demo` sets to 1)"
        )
    console.print(f"iteration {iteration} is bit-identical to the committed one")


@app.command()
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
    doomed = broom.unreached(run.store) if dry_run else broom.vacuum(run.store, take_over)
    for key in doomed:
        console.print(visible(key), highlight=False)
    console.print(f"{counted(len(doomed), 'file')} {'to delete' if dry_run else 'deleted'}")


@app.command()
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


@app.command()
def evaluate(
    name: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="a run, or a Hugging Face model folder", autocompletion=run_names)
    ],
    overrides: Overrides = None,
    data: Annotated[str | None, typer.Option(help="prompt file; by default the run's validation.data")] = None,
    store: Store = DEFAULT_STORE,
    iteration: Iteration = None,
    n: Annotated[
        int | None, typer.Option(help="trajectories per prompt; by default the run's validation.n, or 1", min=1)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="sampling temperature, 0: greedy; by default the run's validation.temperature, or 1", min=0),
    ] = None,
    max_response_tokens: Annotated[int | None, typer.Option(help="maximum length of a response", min=1)] = None,
    reward: Annotated[
        str | None, typer.Option(help="a built-in reward, package.module:function or file.py:function")
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="URL of a server that has the model; it generates the answers")
    ] = None,
    api: Annotated[Api, typer.Option(help="type of the server")] = Api.vllm,
    output: Annotated[Path | None, typer.Option(help="write the trajectories to this Parquet file")] = None,
    trust_code: TrustCode = False,
) -> None:
    """Answer and score held-out prompts, and print the solve rate of each data source with a confidence interval.

    With the run's own prompts and settings, the answers are those of its validation at that iteration, if the same
    engine generates: a run on servers is evaluated with hf, whose answers may differ.
    """
    import tempfile

    from ratchet.flows.commands import tables

    if output is not None:
        make_folder(output.parent)
    with tempfile.TemporaryDirectory() as folder:
        changes: dict[str, object] = {"validation.n": n} if n is not None else {}
        changes |= {"validation.temperature": temperature} if temperature is not None else {}
        changes |= {"validation.data": data} if data else {}
        changes |= {"rollout.max_response_tokens": max_response_tokens} if max_response_tokens else {}
        changes |= {"reward.function": reward, "reward.model": None, "reward.options": {}} if reward else {}
        if server:
            changes |= {"rollout.engine": {"type": "server", "urls": [server], "api": api.value}}
        config, version = tables.evaluation_config(name, store, iteration, Path(folder), changes, overrides or [])
        prefect = _starting()
        from ratchet.flows.evaluate import evaluate as flow
        from ratchet.flows.terminal import progress
        from ratchet.tasks.recording import recorded

        _wait_for(prefect)
        with progress(console):
            answers = recorded(lambda: flow(config, version), lambda: flow.fn(config, version))
    if output is not None:
        tables.write(answers, output)
    console.print(tables.solve_rates(answers, name, config.reward.on_error, config.solved_score))


@app.command()
def serve(
    name: Name,
    overrides: Overrides = None,
    store: Store = DEFAULT_STORE,
    iteration: Iteration = None,
    best: Best = False,
    host: Annotated[
        str, typer.Option(help="address to listen on; any other address than loopback lets the network call the model")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0: any free one", min=0, max=65535)] = 8000,
    trust_code: TrustCode = False,
) -> None:
    """Serve the policy of a snapshot over an OpenAI-compatible endpoint, and store its answers, until Ctrl-C.

    Clients send the key in the variable RATCHET_API_KEY; if it is not set, a new key is printed. `ratchet ingest RUN`
    turns the stored answers into prompts and trajectories.
    """
    _quiet()
    import secrets
    import tempfile
    from contextlib import suppress

    from ratchet.flows.commands import tables
    from ratchet.flows.terminal import progress
    from ratchet.infra.execution.stopping import on_signals
    from ratchet.infra.runs.run import open_run

    run = open_run(url_of(name, store))
    given = os.environ.get("RATCHET_API_KEY")
    key = given or f"sk-{secrets.token_urlsafe(24)}"

    def listening(base_url: str) -> None:
        shown = "$RATCHET_API_KEY" if given else key
        console.print(f"{name} answers at {base_url} (model: policy, key: {shown}); Ctrl-C ends it", highlight=False)

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt), on_signals(end), tempfile.TemporaryDirectory() as folder, progress(console):
        version = _snapshot(run, iteration, best)
        run.exportable(version)
        config = tables.exported_config(run, version, Path(folder), {}, overrides or [])
        from ratchet.flows.serve import serve as answer_calls

        answer_calls(run, config, version, host=host, port=port, key=key, listening=listening)
    console.print(f"the answers are stored; `ratchet ingest {name} -o DIR` turns them into data", highlight=False)


@app.command()
def ingest(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|FILE...",
            help="runs that were served, and files of chats (Parquet, Arrow, JSON, CSV)",
            autocompletion=run_names,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for prompts.parquet and trajectories.parquet")],
    ratings: Annotated[str | None, typer.Option(help="file of ratings: the id of a completion, and score")] = None,
    min_score: Annotated[
        float | None, typer.Option(help="keep only answers rated at least this in the trajectories")
    ] = None,
    store: Store = DEFAULT_STORE,
) -> None:
    """Turn the answers of `ratchet serve`, and files of chats, into prompts for training and trajectories."""
    from ratchet.infra.runs.ingest import ingest as read_logs
    from ratchet.infra.runs.parquet_file import write_parquet
    from ratchet.infra.runs.run import open_run
    from ratchet.rlhf.data.folders import ENDINGS

    is_file = [source.endswith(ENDINGS) or Path(source).is_file() for source in sources]
    logs = [
        source if of_file else open_run(url_of(source, store)) for source, of_file in zip(sources, is_file, strict=True)
    ]
    ingested = read_logs(logs, ratings, min_score)
    make_folder(output)
    for name, table in (("prompts", ingested.prompts), ("trajectories", ingested.trajectories)):
        write_parquet(table, str(output / f"{name}.parquet"))
        console.print(f"{len(table)} {name} in {output / name}.parquet", highlight=False)
    for reason, count in ingested.left_out.items():
        console.print(f"{counted(count, 'answer')} left out: {reason}", highlight=False)
    if ingested.unknown:
        console.print(f"{counted(ingested.unknown, 'rating')} without an answer in these logs", highlight=False)


@app.command()
def export(
    name: Name,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder to write")],
    store: Store = DEFAULT_STORE,
    iteration: Iteration = None,
    role: Annotated[
        Role, typer.Option(help="the model: actor (the policy), critic, or ema (the actor's moving average)")
    ] = Role.actor,
    best: Best = False,
    adapter: Adapter = False,
    trust_code: TrustCode = False,
) -> None:
    """Write the model of a snapshot as a Hugging Face folder, with its tokenizer and a model card."""
    from ratchet.flows.terminal import progress
    from ratchet.infra.runs.run import open_run

    run = open_run(url_of(name, store))
    with progress(console):
        version = _snapshot(run, iteration, best)
    run.exportable(version, role.value, adapter=adapter)
    make_folder(folder)
    with progress(console):
        run.export(version, folder, role.value, adapter=adapter)
    console.print(f"the {role.value} after {counted(version, 'iteration')} is in {folder}")


@app.command()
def push(
    name: Name,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="the repository on the hub: owner/name")],
    store: Store = DEFAULT_STORE,
    iteration: Iteration = None,
    role: Annotated[
        Role, typer.Option(help="the model: actor (the policy), critic, or ema (the actor's moving average)")
    ] = Role.actor,
    best: Best = False,
    adapter: Adapter = False,
    public: Annotated[
        bool, typer.Option("--public", help="make a new repository public, or push to one that is")
    ] = False,
    trust_code: TrustCode = False,
) -> None:
    """Upload the model of a snapshot to the Hugging Face hub, as `export` writes it. New repositories are private.

    The token is that of `hf auth login`, or of the variable HF_TOKEN.
    """
    from ratchet.flows.terminal import progress
    from ratchet.infra.runs import hub
    from ratchet.infra.runs.run import open_run

    run = open_run(url_of(name, store))
    with progress(console):
        version = _snapshot(run, iteration, best)
        pushed = hub.push(run, repo, version, role.value, adapter=adapter, public=public)
    visibility = "private" if pushed.private else "public"
    console.print(
        f"the {role.value} after {counted(version, 'iteration')} is at {pushed.url} ({visibility})", highlight=False
    )


def _snapshot(run: Run, iteration: int | None, best: bool) -> int:
    """The version of the snapshot that the options choose."""
    if best and iteration is not None:
        raise UserError("--best and --iteration both choose the snapshot: give only one")
    return run.best_snapshot() if best else run.newest_snapshot() if iteration is None else iteration


@app.command()
def sft(
    model: Annotated[str, typer.Option(help="the model to start from")],
    data: Annotated[str, typer.Option(help="Parquet, Arrow, JSON or CSV with prompt and response, or with messages")],
    output: Annotated[Path, typer.Option(help="folder of the resulting model; its name is also the run's")],
    steps: Annotated[int, typer.Option(help="optimizer steps", min=1)] = 250,
    batch_examples: Annotated[int, typer.Option(help="examples per optimizer step", min=1)] = 128,
    lr: Annotated[float, typer.Option(help="peak learning rate")] = 1e-5,
    warmup_steps: Annotated[int, typer.Option(help="steps over which the learning rate rises", min=0)] = 0,
    weight_decay: Annotated[float, typer.Option(help="AdamW's weight decay", min=0)] = 0.0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    seed: Annotated[int, typer.Option(help="seed of the order of the examples", min=0)] = 0,
    store: Store = DEFAULT_STORE,
    overrides: Overrides = None,
) -> None:
    """Supervised fine-tuning on prompts and responses, the first step of every RLHF recipe."""
    config = {
        "run": {"name": output.name, "store": store, "seed": seed},
        "model": {"path": model, "dtype": dtype},
        "data": data,
        "output": str(output),
        "steps": steps,
        "batch_examples": batch_examples,
        "lr": lr,
        "warmup_steps": warmup_steps,
        "weight_decay": weight_decay,
    }
    metrics = _fit(validated(SFTConfig, overridden(config, overrides or [], SFTConfig), "sft"))
    console.print(f"supervised model in {output} (loss {metrics['sft/loss']:.3f})")


@app.command()
def reward_model(
    model: Annotated[str, typer.Option(help="the model to start from, such as a supervised one")],
    data: Annotated[str, typer.Option(help="Parquet, Arrow, JSON or CSV with prompt, chosen and rejected")],
    output: Annotated[Path, typer.Option(help="folder of the resulting model; its name is also the run's")],
    validation: Annotated[str | None, typer.Option(help="held-out pairs")] = None,
    epochs: Annotated[int, typer.Option(help="passes over the pairs", min=1)] = 1,
    batch_pairs: Annotated[int, typer.Option(help="pairs per optimizer step", min=1)] = 64,
    lr: Annotated[float, typer.Option(help="peak learning rate")] = 1e-5,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    seed: Annotated[int, typer.Option(help="seed of the order of the pairs", min=0)] = 0,
    store: Store = DEFAULT_STORE,
    overrides: Overrides = None,
) -> None:
    """Train a reward model on preferences (Bradley-Terry), for reward.model; the same command resumes it."""
    config = {
        "run": {"name": output.name, "store": store, "seed": seed},
        "model": {"path": model, "dtype": dtype},
        "data": data,
        "validation": validation,
        "output": str(output),
        "epochs": epochs,
        "batch_pairs": batch_pairs,
        "lr": lr,
    }
    metrics = _fit(validated(RewardTraining, overridden(config, overrides or [], RewardTraining), "reward-model"))
    held_out = f", {metrics['val/accuracy']:.1%} of the held-out pairs" if "val/accuracy" in metrics else ""
    console.print(
        f"reward model in {output} ({metrics['reward/accuracy']:.1%} of the pairs are ranked correctly{held_out})"
    )


def _fit(config: SFTConfig | RewardTraining) -> dict[str, float]:
    make_folder(Path(config.output))
    server = _starting()
    from ratchet.flows.sft import sft as supervise
    from ratchet.flows.terminal import progress
    from ratchet.flows.train_reward_model import train_reward_model
    from ratchet.tasks.recording import recorded

    _wait_for(server)
    with progress(console):
        if isinstance(config, SFTConfig):
            return recorded(lambda: supervise(config), lambda: supervise.fn(config))
        return recorded(lambda: train_reward_model(config), lambda: train_reward_model.fn(config))


@app.command()
def deploy(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="the run's config")],
    overrides: Overrides = None,
    pool: Annotated[str, typer.Option(help="the work pool; a process pool is made if there is none")] = "ratchet",
    cron: Annotated[str | None, typer.Option(help='when to start or resume train, such as "0 3 * * *"')] = None,
    every: Annotated[int | None, typer.Option(metavar="MINUTES", help="or the interval between starts", min=1)] = None,
    new_runs: Annotated[bool, typer.Option("--new-runs", help="each start begins a new run")] = False,
) -> None:
    """Register train, iteration, evaluate, rescore, report and vacuum on the Prefect server (PREFECT_API_URL)."""
    from datetime import timedelta

    loaded = load_config(config, overrides or [])
    _needs_server()
    if cron and every:
        raise UserError("--cron and --every both set the schedule: give only one")
    from ratchet.flows.deploy import deploy as register

    interval = None if every is None else timedelta(minutes=every)
    names = register(loaded, pool=pool, cron=cron, every=interval, new_runs=new_runs)
    for name in names:
        console.print(name, highlight=False)
    console.print(f"start a worker with `ratchet worker --pool {pool}`; then `prefect deployment run {names[0]}`")
    if urlsplit(api := os.environ["PREFECT_API_URL"]).port != 4200:
        console.print(f"the server shows blank pages unless it was started with PREFECT_UI_API_URL={api}")


@app.command()
def worker(
    pool: Annotated[str, typer.Option(help="the work pool")] = "ratchet",
    once: Annotated[bool, typer.Option("--once", help="start what is due, wait for it, and exit")] = False,
) -> None:
    """Start a Prefect worker that runs deployed flows on this machine."""
    _needs_server()
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process"]
    sys.stdout.flush()
    os.execv(sys.executable, [*command, *(["--run-once"] if once else [])])  # so that signals reach it


def _needs_server() -> None:
    if not os.environ.get("PREFECT_API_URL"):
        raise UserError(
            "PREFECT_API_URL is not set: start a server with `prefect server start`, and "
            "`export PREFECT_API_URL=http://127.0.0.1:4200/api`"
        )


@app.command()
def doctor(
    engines: Annotated[
        bool, typer.Option("--engines", help="also try every engine and Ray; takes half a minute")
    ] = False,
) -> None:
    """Show which packages are installed, and which engines and stores work on this machine."""
    _quiet()
    from ratchet.flows.commands.doctor import doctor as examine

    examine(console, engines)


def _announce(config: RunConfig, accept_changes: bool) -> None:
    """Check everything that a start would, and say what it would do."""
    _quiet()
    from ratchet.flows.summary import first_prompt, summary
    from ratchet.flows.terminal import progress
    from ratchet.infra.execution.driver import check_start, say_what_changed, with_iterations
    from ratchet.tasks.fingerprints import check_open_iteration

    with progress(console):
        config = with_iterations(config)
        state = check_start(config, take_over=True, accept_changes=accept_changes, check=check_open_iteration)
        say_what_changed(state, config)
    for line in (*summary(config, state), first_prompt(config)):
        console.print(visible(line), highlight=False)


def _drive(config: RunConfig, take_over: bool = False, accept_changes: bool = False) -> None:
    server = _starting()
    from ratchet.flows.terminal import progress
    from ratchet.infra.execution.claims import run_url
    from ratchet.infra.execution.driver import with_iterations
    from ratchet.infra.execution.stopping import on_signals
    from ratchet.infra.runs.run import open_run

    with on_signals(_stop_early), progress(console):
        config = with_iterations(config)
    _train_to_the_end(config, server, take_over, accept_changes)
    elsewhere = "" if config.run.store == DEFAULT_STORE else f" --store {config.run.store}"
    done = open_run(run_url(config.run.store, config.run.name)).state.iteration
    is_whole = done == config.iterations
    has = f"its {counted(done, 'iteration')}" if is_whole else reached(done, config.iterations)
    console.print(
        f"run {config.run.name} has {has}\n"
        f"  ratchet status {config.run.name}{elsewhere}    what each iteration did\n"
        f"  ratchet show {config.run.name}{elsewhere}      the trajectories"
    )


def _stop_early(*_: object) -> None:
    """Handle a signal before the driver starts or after it ends. An `Exception` would be lost while a package is
    imported that catches it; `sys.stderr` refuses to print while it is interrupted."""
    os.write(2, b"error: stopped: repeat the command to continue\n")
    raise SystemExit(1)


def _train_to_the_end(
    config: RunConfig, server: TemporaryServer | None, take_over: bool = False, accept_changes: bool = False
) -> None:
    """Start or continue a run until it has all iterations."""
    from ratchet.flows.terminal import progress
    from ratchet.infra.execution.driver import check_start
    from ratchet.infra.execution.stopping import on_signals

    with on_signals(_stop_early), progress(console, config.iterations):
        from ratchet.tasks.fingerprints import check_open_iteration

        check_start(config, take_over=take_over, accept_changes=accept_changes, check=check_open_iteration)
        from ratchet.flows.train import drive
        from ratchet.flows.train import train as flow
        from ratchet.tasks.recording import recorded

        _wait_for(server)
        ended = recorded(
            lambda: flow(config, take_over=take_over, accept_changes=accept_changes),
            lambda: drive(config, take_over, accept_changes),
        )
        if ended is not None:  # a `Failed` state, if Prefect did not record the flow
            ended.result()


def _quiet() -> None:
    """Silence Prefect; call this before importing it. Errors are printed in one line here instead."""
    silent = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL" if os.environ.get("PREFECT_API_URL") else "PREFECT_LOGGING_LEVEL"
    os.environ.setdefault(silent, "CRITICAL")
    os.environ.setdefault("PREFECT_INTERNAL_LOGGING_LEVEL", "CRITICAL")  # a stop may end the server before its client
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _starting() -> TemporaryServer | None:
    """Start a temporary Prefect server in the background; None if PREFECT_API_URL names a server."""
    _quiet()
    return None if os.environ.get("PREFECT_API_URL") else TemporaryServer()


def _wait_for(server: TemporaryServer | None) -> None:
    """Wait for a temporary server, and tell the user if that takes a while."""
    if server is not None:
        if not server.is_ready:
            console.print("starting Prefect (a temporary server on this machine; 5 to 40 s)")
        server.wait()


whole_short_help(app)  # once all commands are there

if __name__ == "__main__":
    main()
