"""Tries several settings from one point of a run: forks that share everything before it.

The arms run in groups, of one arm unless there is a pool of workers; Optuna chooses their settings and stops arms that
fall behind. A sweep has no state of its own: each arm is a run, and Optuna's choices depend only on the scores of
earlier arms and of the same group. The same command therefore continues a sweep that was killed.
"""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from ratchet.flows import report
from ratchet.infra.execution import heartbeat
from ratchet.infra.execution.claims import run_url
from ratchet.infra.runs.run import Run, open_run
from ratchet.infra.store.log import Corrupt, Fenced, RunLog
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.run_store import REPORT
from ratchet.rlhf import consent
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError, counted
from ratchet.tasks.analysis.plan import dependents, fork_run, latest_point
from ratchet.tasks.analysis.whatif import Arm as WhatIfArm
from ratchet.tasks.analysis.whatif import by_gain, whatif
from ratchet.tasks.pipeline import stage_called

if TYPE_CHECKING:
    import optuna

Pruner = Literal["halving", "median", "none"]
Train = Callable[[Sequence[RunConfig]], None]
"""Runs or continues the runs of configs to their ends. May raise `Fenced` if another driver has one of them."""
Say = Callable[[str], None]
"""Prints a line about an arm."""
SPEC = "sweep.json"
SCREENED = "screened.json"
"""The combinations of values that are left after the screening, in the order in which they start."""
STUDY = "study.log"
"""Optuna's study, in the format of its `JournalFileBackend`, for use with Optuna's tools."""
REDUCTION = 3
"""One of so many arms continues from each rung, with so many times the iterations."""
RUNGS = 2
"""Number of comparisons on the way to all iterations."""
SEED = 0
TOKENS = "perf/generated_tokens"


class Sweep(BaseModel):
    """The settings of a sweep; stored in its folder."""

    model_config = ConfigDict(frozen=True)

    parent: str
    name: str
    """Name of the sweep; arms are named after it."""
    iteration: int
    """Iteration of `parent` in which the arms start."""
    stage: str | None
    """The first stage of that iteration that the arms compute themselves; None: the first that the settings change."""
    vary: dict[str, tuple[str, ...]]
    """Values in YAML, by key."""
    iterations: int
    """Number of iterations of an arm that is not stopped."""
    metric: str | None
    """Metric of the validation that compares arms; None: that of the config, or the first one."""
    trials: int | None
    """Number of arms, whose values Optuna draws; None: all combinations."""
    pruner: Pruner
    screen: tuple[int, int] | None = None
    """First iteration of `parent`, and the one after the last, by whose updates arms are dropped before they start
    (`whatif`); None: no arm is."""
    parallel: int = 1
    """Number of arms of a group, which train at the same time."""

    @property
    def store(self) -> str:
        return self.parent.rpartition("/")[0]

    @property
    def rungs(self) -> tuple[int, ...]:
        """Numbers of iterations after which an arm is compared with earlier ones; the last is the end."""
        total = self.iterations - self.iteration
        if self.pruner == "none":
            return (self.iterations,)
        steps = (max(1, total // REDUCTION**power) for power in range(RUNGS, 0, -1))
        return tuple(sorted({self.iteration + step for step in steps} | {self.iterations}))


@dataclass
class Arm:
    """One setting that was tried."""

    run: str
    values: dict[str, str]
    at: str
    scores: dict[int, float] = field(default_factory=dict)
    """Score of the validation after a number of iterations."""
    is_stopped: bool = False
    """True if it fell behind when it was last tried."""
    tokens_shared: int = 0
    """Tokens of the parent that this arm shares instead of generating them."""

    @property
    def score(self) -> float:
        return self.scores[max(self.scores)]


@dataclass
class _Attempt:
    """A trial of Optuna. Two trials may share an arm, since Optuna can draw the same values twice."""

    trial: optuna.Trial
    arm: Arm
    is_stopped: bool = False


def begin(sweep: Sweep) -> None:
    """Stores the settings of the sweep, unless they are stored.

    Raises `UserError` if another sweep has the name, it does not fit the run, or there is no consent to the run's code.
    """
    if importlib.util.find_spec("optuna") is None:
        raise UserError('a sweep needs the package optuna: pip install "ratchet-rlhf[sweep]"')
    parent = open_run(sweep.parent)
    if not 0 <= sweep.iteration <= parent.state.iteration:
        raise UserError(f"--at {sweep.iteration}: the run has iterations 0 to {parent.state.iteration} (the open one)")
    if sweep.iterations <= sweep.iteration:
        raise UserError(f"--iterations {sweep.iterations}: the arms begin in iteration {sweep.iteration}: raise it")
    if parent.config.validation.data is None:
        raise UserError(f"{sweep.parent} has no validation.data, by which arms are compared: fork it with one first")
    if sweep.screen is not None and sweep.trials is not None:
        raise UserError("--screen judges all combinations, and --trials draws some: leave one of them out")
    mistakes = []
    for key, values in sweep.vary.items():
        for value in values:
            try:
                parent.config.with_values({}, [f"{key}={value}"])
            except UserError as error:
                mistakes += str(error).splitlines()
    if mistakes:
        raise UserError("\n".join(dict.fromkeys(mistakes)))
    consent.require(parent.config)
    objects = ObjectStore(run_url(sweep.store, sweep.name))
    if RunLog(objects).read().slot >= 0:
        raise UserError(f"there is a run {sweep.name}: choose another name (--run)")
    try:
        objects.create(SPEC, sweep.model_dump_json(indent=1).encode())
    except FileExistsError:
        stored = _stored(objects)
        if stored != sweep:
            changed = ", ".join(name for name in Sweep.model_fields if getattr(stored, name) != getattr(sweep, name))
            raise UserError(
                f"the sweep {sweep.name} exists with other settings ({changed}): repeat its command, or choose another "
                "name (--run)"
            ) from None


def _stored(objects: ObjectStore) -> Sweep:
    try:
        return Sweep.model_validate_json(objects.get(SPEC))
    except ValueError:
        raise Corrupt(f"{objects.url}/{SPEC} is damaged: delete it, and repeat the command of the sweep") from None


def run_arms(sweep: Sweep, train: Train, say: Say) -> Iterator[Arm]:
    """Runs or continues the arms of a sweep that has begun; yields each arm when its group is complete or was stopped.

    Args:
        train: Trains the arms of a group that continue, at the same time if it can.

    Raises:
        UserError: An arm's settings do not fit, or the metric does not exist.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield from _run_arms(sweep, train, say, Path(folder) / STUDY)


def _run_arms(sweep: Sweep, train: Train, say: Say, journal: Path) -> Iterator[Arm]:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    parent, known = open_run(sweep.parent), dict[tuple[str, ...], Arm]()
    tokens = sum(int(row.get(TOKENS, 0)) for row in parent.metric_rows() if row["iteration"] < sweep.iteration)
    objects = ObjectStore(run_url(sweep.store, sweep.name))
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(journal))),
        study_name=sweep.name,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=SEED),  # its constant liar keeps the arms of a group apart
        pruner=_pruner(sweep),
    )
    combinations = [dict(zip(sweep.vary, values, strict=True)) for values in product(*sweep.vary.values())]
    if sweep.screen is not None:
        combinations = _screened(sweep, parent, combinations, objects, say)
    if sweep.trials is None:
        for values in combinations:
            study.enqueue_trial(values)
    total = len(combinations) if sweep.trials is None else sweep.trials
    for first in range(0, total, sweep.parallel):
        group = list[_Attempt]()
        for number in range(first, min(first + sweep.parallel, total)):
            trial = study.ask()
            values = {key: str(trial.suggest_categorical(key, choices)) for key, choices in sweep.vary.items()}
            if (arm := known.get(tuple(values.values()))) is None:
                arm = known[tuple(values.values())] = _arm(
                    sweep, parent, f"{sweep.name}-{len(known):02d}", values, tokens
                )
                settings = ", ".join(f"{key}={value}" for key, value in values.items())
                say(f"arm {number + 1} of {total}: {settings}, in {arm.run}")
            group.append(_Attempt(trial, arm))
        for rung in sweep.rungs:
            if going := [attempt for attempt in group if not attempt.is_stopped]:
                _advance(sweep, parent, going, rung, train, say)
        for attempt in group:
            score = None if attempt.is_stopped else attempt.arm.score
            study.tell(attempt.trial, score, state=_state(attempt.is_stopped))
        # only for people: a repeated command computes the choices from the scores of the arms again
        objects.put(STUDY, journal.read_bytes())
        yield from (attempt.arm for attempt in group)


def _screened(
    sweep: Sweep, parent: Run, combinations: Sequence[dict[str, str]], objects: ObjectStore, say: Say
) -> list[dict[str, str]]:
    """Returns the combinations that `whatif` leaves, the best first, and those about which it cannot tell last.

    One is dropped if its interval lies below that of the best. A repeated command reads what was decided.
    """
    if (decided := objects.get_if_there(SCREENED)) is not None:
        return TypeAdapter(list[dict[str, str]]).validate_json(decided)
    assert sweep.screen is not None
    arms = {}
    for values in combinations:
        overrides = tuple(f"{key}={value}" for key, value in values.items())
        arms[" ".join(overrides)] = WhatIfArm(" ".join(overrides), overrides), values
    results = list(whatif(parent, range(*sweep.screen), [arm for arm, _ in arms.values()]))
    estimates = by_gain(results)
    lowest = max((mean.change - mean.reach for _, mean in estimates if mean is not None), default=-math.inf)
    kept = list[dict[str, str]]()
    for name, mean in estimates:
        if mean is not None and mean.change + mean.reach < lowest:
            say(f"{name} is dropped: after an update, the mean score is {mean.change:+.4f} ± {mean.reach:.4f}")
        else:
            kept.append(arms[name][1])
    objects.put(SCREENED, json.dumps(kept).encode())
    return kept


def _advance(sweep: Sweep, parent: Run, group: Sequence[_Attempt], rung: int, train: Train, say: Say) -> None:
    """Trains the arms of a group to a rung, and stops arms that fall behind."""
    _train_to(sweep, parent, {attempt.arm.run: attempt.arm for attempt in group}.values(), rung, train, say)
    for attempt in group:
        if (score := _score(sweep, parent, attempt.arm.run, rung)) is None:
            known_metrics = sorted(open_run(run_url(sweep.store, attempt.arm.run)).store.validation_metrics(rung))
            raise UserError(
                f"--metric {sweep.metric}: no such metric of a validation; there are {', '.join(known_metrics)}"
            )
        attempt.arm.scores[rung] = score
        attempt.trial.report(score, rung - sweep.iteration)
    # the best first: halving compares an arm with those that were asked about before it, and with itself
    for attempt in sorted(group, key=lambda attempt: attempt.arm.scores[rung], reverse=True):
        attempt.is_stopped = attempt.arm.is_stopped = rung != sweep.rungs[-1] and attempt.trial.should_prune()
    for attempt in group:
        goes_on = "stops" if attempt.is_stopped else "is done" if rung == sweep.rungs[-1] else "goes on"
        say(f"{attempt.arm.run} after {counted(rung, 'iteration')}: {attempt.arm.scores[rung]:.4g}, {goes_on}")


def _train_to(sweep: Sweep, parent: Run, arms: Iterable[Arm], rung: int, train: Train, say: Say) -> None:
    """Trains the arms that have no score at a rung."""
    while missing := [arm for arm in arms if _score(sweep, parent, arm.run, rung) is None]:
        try:
            train([_config(sweep, parent, arm.run, arm.values, rung) for arm in missing])
            return
        except Fenced:
            # another driver has one of them: it comes first
            for arm in missing:
                _wait_for_driver(arm.run, ObjectStore(run_url(sweep.store, arm.run)), say)


def _wait_for_driver(run: str, objects: ObjectStore, say: Say) -> None:
    is_said = False
    while alive := heartbeat.is_alive(objects):
        if not is_said:
            say(f"{run} is being driven by another process (pid {alive.pid} on {alive.host}): the sweep waits for it")
            is_said = True
        time.sleep(heartbeat.INTERVAL_S / 5)


def _state(is_stopped: bool) -> optuna.trial.TrialState:
    import optuna

    return optuna.trial.TrialState.PRUNED if is_stopped else optuna.trial.TrialState.COMPLETE


def _pruner(sweep: Sweep) -> optuna.pruners.BasePruner:
    import optuna

    match sweep.pruner:
        case "halving":
            first = sweep.rungs[0] - sweep.iteration
            return optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=REDUCTION)
        case "median":
            return optuna.pruners.MedianPruner(n_startup_trials=2)
        case "none":
            return optuna.pruners.NopPruner()


def _config(sweep: Sweep, parent: Run, run: str, values: Mapping[str, str], iterations: int) -> RunConfig:
    named = {"run.name": run, "run.store": sweep.store, "train.iterations": iterations}
    return parent.config.with_values(named, [f"{key}={value}" for key, value in values.items()])


def _arm(sweep: Sweep, parent: Run, run: str, values: dict[str, str], tokens: int) -> Arm:
    """Returns an arm, after forking its run unless it exists; `tokens` counts those generated before the arms start."""
    config = _config(sweep, parent, run, values, sweep.rungs[0])
    iteration, stage = _point(sweep, parent, config)
    if RunLog(ObjectStore(run_url(sweep.store, run))).read().slot < 0:
        fork_run(parent, config, iteration, stage)
    at = str(iteration) if stage is None else f"{iteration}:{stage}"
    return Arm(run, values, at, tokens_shared=tokens + _tokens_of(parent, config, iteration, stage))


def _point(sweep: Sweep, parent: Run, config: RunConfig) -> tuple[int, str | None]:
    """Returns the point where an arm starts: as late as its settings allow, unless the sweep names a stage."""
    if sweep.stage is not None:
        return sweep.iteration, sweep.stage
    return latest_point(parent, config, sweep.iteration)


def _tokens_of(parent: Run, config: RunConfig, iteration: int, stage: str | None) -> int:
    """Returns the tokens that the parent generated in the iteration in which an arm starts, if the arm shares them."""
    called = None if stage is None else stage_called(stage, config)
    if called is None or "generate" in dependents(called.name, config):
        return 0
    generated = parent.store.manifests(iteration).get("generate")
    return 0 if generated is None else int(generated.metrics.get(TOKENS, 0))


def _score(sweep: Sweep, parent: Run, run: str, iterations: int) -> float | None:
    """Returns the score of the validation after some iterations; None if there is none, or not by that metric."""
    store = open_run(run_url(sweep.store, run)).store
    if store.state.iteration < iterations:
        return None
    return store.validation_scores({iterations}, sweep.metric or parent.config.validation.metric).get(iterations)


def table(arms: Sequence[Arm]) -> list[dict[str, str]]:
    return [
        {
            "run": arm.run,
            **arm.values,
            "begins at": arm.at,
            "iterations": str(max(arm.scores)),
            "score": f"{arm.score:.4g}",
            "": "stopped" if arm.is_stopped else "",
        }
        for arm in sorted(
            {arm.run: arm for arm in arms}.values(), key=lambda arm: (not arm.is_stopped, arm.score), reverse=True
        )
    ]


def write_page(sweep: Sweep, arms: Sequence[Arm]) -> str:
    """Writes the page that compares the arms into the sweep's folder; returns its URL."""
    objects = ObjectStore(run_url(sweep.store, sweep.name))
    runs = [open_run(run_url(sweep.store, name)) for name in dict.fromkeys(row["run"] for row in table(arms))]
    objects.put(REPORT, report.page(runs, sweep.name, table(arms)).encode())
    return f"{objects.url}/{REPORT}"


def parse_vary(options: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parses ``key=a,b,c``; raises `UserError` if an option has another form, or a key twice."""
    vary: dict[str, tuple[str, ...]] = {}
    for option in options:
        key, equals, values = option.partition("=")
        choices = tuple(value.strip() for value in _split(values))
        if not equals or not key or not all(choices):
            raise UserError(f"--vary {option}: write key=a,b,c, such as actor.lr=1e-5,1e-6")
        if key in vary or len(set(choices)) < len(choices):
            raise UserError(f"--vary {option}: {key if key in vary else 'a value'} is there twice")
        vary[key] = choices
    if prod(map(len, vary.values())) < 2:
        raise UserError("--vary has one setting: give two values at least")
    return vary


def _split(values: str) -> list[str]:
    """Splits at commas outside brackets."""
    parts, depth = [""], 0
    for character in values:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
