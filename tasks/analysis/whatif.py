"""Judges other settings of reward, algorithm and update on stored trajectories, without generating any.

For each iteration and each setting (an *arm*), scores, advantages and the actor's update are computed again, from the
weights with which the stored update began. It claims and writes nothing, so a driver may work on the run at the same
time.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.progress import StepProgress, report
from ratchet.infra.runs.forks import state_before
from ratchet.infra.runs.run import Run, own_answers
from ratchet.infra.store.records import Skip, Weights
from ratchet.infra.store.uncommitted import WithUncommitted
from ratchet.infra.workers.calls import C, RowsCall, S, UpdateCall, Updated
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf import consent
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import NotFinite, UserError
from ratchet.rlhf.rewards.registry import check_rewards
from ratchet.rlhf.schema import trajectory_of
from ratchet.tasks.analysis.bisect import mean_in_loss
from ratchet.tasks.analysis.off_policy import Estimate, estimated, together
from ratchet.tasks.pipeline import names_of, stages_of
from ratchet.tasks.restore import ensure_weights
from ratchet.tasks.stage import RowsStage
from ratchet.tasks.stages.advantages import ADVANTAGES
from ratchet.tasks.stages.generate import GENERATE
from ratchet.tasks.stages.old_log_probs import OLD_LOG_PROBS
from ratchet.tasks.stages.score import SCORE
from ratchet.tasks.stages.select import FILTER_GROUPS
from ratchet.tasks.stages.update_actor import UPDATE_ACTOR
from ratchet.tasks.stages.validate import VALIDATE
from ratchet.tasks.worker_calls import call_of, on_worker

if TYPE_CHECKING:
    import torch

JUDGED = (SCORE, FILTER_GROUPS, ADVANTAGES, UPDATE_ACTOR)
"""The stages that an arm may change."""
SECTIONS = ("reward.", "algorithm.", "actor.")
"""The sections of the config that an arm may change, as far as `JUDGED` read them."""
ENGINE = "actor.engine"
"""A key of the update that is not judged: the engine is loaded with the run's."""
NO_ADVANTAGE = 1e-6
"""Advantages that are nearer to 0 have no sign: they differ from it by rounding."""

NEXT_SETTING = re.compile(r"\s+(?=\+{0,2}\w+(?:\.\w+)+=)")
"""Where another setting begins: values may have spaces."""
NEXT = (
    "trajectory_id",
    "prompt_id",
    "policy_version",
    "replayed_from",
    "by_expert",
    "rollout_error",
    "score",
    "reward_error",
)
"""Columns of the trajectories by which an update is judged."""


@dataclass(frozen=True)
class Arm:
    """Other settings, of which all are changed together."""

    name: str
    """The settings as the user wrote them."""
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Update:
    """An update of the actor: the difference of its trainable weights after and before."""

    norm: float
    cosine: float | None
    """Cosine of the angle between this update and the one that the run made; None: one of them is zero."""
    metrics: dict[str, float]
    """The metrics that the stage would have stored, such as `actor/pg_clipfrac`."""


@dataclass(frozen=True)
class WhatIf:
    """An iteration under an arm, beside what the run made of it."""

    iteration: int
    arm: str
    changed_scores: float
    """Share of the trajectories whose score differs."""
    score: tuple[float, float]
    """Mean score of all trajectories: in the run, and under the arm."""
    changed_signs: float
    """Share of the trajectories, of those that both learn from, whose mean advantage has another sign."""
    selected: tuple[int, int]
    """Number of trajectories to learn from: in the run, and under the arm."""
    made: Update
    """The update that the run made."""
    update: Update | None
    """The update under the arm; None: there is none."""
    why_not: str
    """Why there is no update; empty if there is one."""
    objective: Estimate | None
    """The run's own mean score under the arm's update, estimated from the trajectories of the next iteration, which the
    policy of the run's update generated; None: that iteration has none."""


def parse_iterations(text: str) -> range:
    """Parses ``5`` or ``5:15``, which is 5 to 14, as Python's slices are.

    Raises:
        UserError: The text has another form, or names no iteration.
    """
    first, colon, end = text.partition(":")
    try:
        iterations = range(int(first), int(end) if colon else int(first) + 1)
    except ValueError:
        raise UserError(f"--iterations {text}: write K, or FIRST:END such as 5:15 for iterations 5 to 14") from None
    if not iterations:
        raise UserError(f"--iterations {text}: it names no iteration; 5:15 are iterations 5 to 14")
    return iterations


def newest(run: Run) -> range:
    """Returns the newest iteration that updated the actor and whose successor has scores; otherwise the newest one."""
    last = run.state.iteration
    judged = [number for number in range(max(last - 1, 0), last + 1) if _without_update(run, number) is None]
    if not judged:
        raise UserError(f"{run.store.url}: the newest iterations have not updated the actor: choose with --iterations")
    return range(judged[0], judged[0] + 1)


def by_gain(results: Sequence[WhatIf]) -> list[tuple[str, Estimate | None]]:
    """Returns each arm with its mean estimate over the iterations, the best first; those without one are last."""
    estimates: dict[str, list[Estimate]] = {}
    for result in results:
        estimates.setdefault(result.arm, []).extend([] if result.objective is None else [result.objective])
    means = [(arm, together(found)) for arm, found in estimates.items()]
    return sorted(means, key=lambda pair: -math.inf if pair[1] is None else pair[1].change, reverse=True)


def parse_arms(options: Sequence[str]) -> list[Arm]:
    """Parses arms such as ``actor.lr=1e-5 algorithm.advantage=rloo``: one or more settings, with values in YAML.

    Raises:
        UserError: An arm has no settings, or is there twice.
    """
    arms: list[Arm] = []
    for option in options:
        overrides = tuple(NEXT_SETTING.split(option.strip()))
        if not all(NEXT_SETTING.match(f" {override}") for override in overrides):
            raise UserError(f"--set {option}: write KEY=VALUE, or several in quotes: 'actor.lr=1e-5 reward.function=f'")
        if any(overrides == arm.overrides for arm in arms):
            raise UserError(f"--set {option}: it is there twice")
        arms.append(Arm(option, overrides))
    return arms


def whatif(run: Run, iterations: Sequence[int], arms: Sequence[Arm]) -> Iterator[WhatIf]:
    """Computes the updates that iterations would have made under other settings; yields a result for each arm of each
    iteration.

    Args:
        run: A run that Ratchet computes.
        iterations: Iterations with a committed update of the actor.
        arms: The settings to judge.

    Raises:
        UserError: An iteration has no update, an arm changes what cannot be judged from stored trajectories (a line for
            each mistake), or there is no consent to the run's code.
    """
    run.config.require_own("cannot compute its updates again")
    configs = _checked(run, iterations, arms)
    store = WithUncommitted(run.store)
    # in this process, without a claim
    driver = Driver(run.config.as_committed({"pools": {}, "placement": "colocated"}), store)
    try:
        for number, iteration in enumerate(iterations):
            judge = _Judge(driver, store, run, iteration, configs[iteration][""])
            for place, arm in enumerate(arms):
                done = number * len(arms) + place
                report(StepProgress(what="updates", done=done, total=len(iterations) * len(arms)))
                yield judge.judged(arm, configs[iteration][arm.name])
                store.forget()
            judge.leave()
    finally:
        driver.groups.close()


def _checked(run: Run, iterations: Sequence[int], arms: Sequence[Arm]) -> dict[int, dict[str, RunConfig]]:
    """Returns the configs of iterations by arm, that of the run as the arm ``""``. Raises `UserError` as `whatif`."""
    configs: dict[int, dict[str, RunConfig]] = {}
    mistakes: list[str] = []
    consent.require(run.config)
    if without := {number: why for number in iterations if (why := _without_update(run, number)) is not None}:
        named = ", ".join(map(str, without))
        mistakes.append(f"iteration {named}: {'; '.join(dict.fromkeys(without.values()))}: choose with --iterations")
    place = f"--at {iterations[0]} --run NEW"
    for iteration in (number for number in iterations if number not in without):
        manifests = run.store.manifests(iteration)
        then = {key: value for manifest in manifests.values() for key, value in manifest.config.items()}
        own = run.config.as_committed({**then, "pools": {}, "placement": "colocated"})
        consent.require(own)  # it may name other code than the newest config
        configs[iteration] = {"": own}
        for arm in arms:
            try:
                config = own.with_values({}, arm.overrides)
                consent.require(run.config, config)
                if config.reward != own.reward:
                    check_rewards(config.reward)
                unfit = _unfit(own, config, arm, manifests.keys())
            except UserError as error:
                mistakes += [f"--set {arm.name}: {line}" for line in str(error).splitlines()]
                continue
            instead = f"try it with `ratchet fork {run.config.run.name} {place} {shlex.join(arm.overrides)}`"
            mistakes += [f"--set {arm.name}: {why}: {instead}" for why in unfit]
            configs[iteration][arm.name] = config
    if mistakes:
        raise UserError("\n".join(dict.fromkeys(mistakes)))
    return configs


def _without_update(run: Run, iteration: int) -> str | None:
    """Returns why an iteration has no committed update of the actor; None if it has one."""
    if not 0 <= iteration <= run.state.iteration:
        return f"the run has iterations 0 to {run.state.iteration}"
    committed = run.store.committed_stage(iteration, UPDATE_ACTOR.name)
    if committed is None:
        return "the actor is not updated"
    return f"the actor was not updated ({committed.reason})" if isinstance(committed, Skip) else None


def _unfit(own: RunConfig, config: RunConfig, arm: Arm, stored: Collection[str]) -> list[str]:
    """Describes why an arm cannot be judged, one text for each of its settings."""
    stages = [stage for stage in stages_of(config) if stage not in JUDGED and stage is not VALIDATE]
    needed = {stage.name for stage in stages if isinstance(stage, RowsStage) and stage is not OLD_LOG_PROBS}
    if lacking := sorted(needed - set(stored)):
        return [f"the run has not stored {', '.join(lacking)}, which it needs"]
    changed = list(_changed_keys(own.model_dump(mode="json"), config.model_dump(mode="json")))
    if config.reward.judge is not None and any(key.startswith("reward.") for key in changed):
        return ["it would ask a judge, whose answers only `ratchet rescore` keeps"]
    named = [override.partition("=")[0].lstrip("+") for override in arm.overrides]
    why: dict[str, str] = {}
    for key in changed:
        readers = [stage.name for stage in stages if _reads(stage.config.keys(operational=False), key)]
        judged = any(_reads(stage.config.keys(), key) for stage in JUDGED)
        setting = next((name for name in named if f"{key}.".startswith(f"{name}.")), key)
        if key.startswith("model."):
            why[setting] = f"{setting} changes the model"
        elif GENERATE.name in readers:
            why[setting] = f"{setting} changes what is generated"
        elif readers:
            why[setting] = f"{setting} changes {', '.join(readers)}"
        elif not judged or not key.startswith(SECTIONS) or key.startswith(ENGINE):
            why[setting] = f"{setting} changes nothing that stored trajectories can show"
    return list(why.values())


def _changed_keys(before: object, after: object, path: str = "") -> Iterator[str]:
    """Yields the dotted keys whose values differ."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in dict.fromkeys((*before, *after)):
            yield from _changed_keys(before.get(name), after.get(name), f"{path}.{name}" if path else str(name))
    elif before != after:
        yield path


def _reads(keys: Iterator[str], key: str) -> bool:
    """True if one of `keys` is a key, or a section around it or within it."""
    return any(read == key or key.startswith(f"{read}.") or read.startswith(f"{key}.") for read in keys)


class _Judge:
    """Judges arms on one iteration. It keeps the actor's state before and after the run's update in memory."""

    def __init__(self, driver: Driver, store: WithUncommitted, run: Run, iteration: int, own: RunConfig) -> None:
        self._driver, self._store, self._run = driver, store, run
        self._iteration, self._own = iteration, own
        self._manifests = store.manifests(iteration)
        self._began = state_before(store, iteration, ())
        self._stored = self._of_stored()
        self._before = store.iteration_state(iteration).starting["actor"]
        after = self._manifests[UPDATE_ACTOR.name].weights
        assert after is not None, "an update has weights"
        self._after = after
        self._files = self._state_of(self._before)
        self._made_files = self._state_of(after)
        self._moved = _difference(self._files, self._made_files)
        self._next = self._trajectories_of_next()
        self._next_log_probs = None if self._next is None else self._log_probs_of_next(after)

    def leave(self) -> None:
        """Puts the weights after the run's update back: the next iteration begins with them."""
        self._load(self._made_files, self._after)

    def judged(self, arm: Arm, config: RunConfig) -> WhatIf:
        """Computes the iteration under an arm's config."""
        self._load(self._files, self._before)
        handles, why_not = self._scored(config)
        update: Update | None = None
        objective: Estimate | None = None
        advantages = learns = self._advantages(self._stored)
        if not why_not:
            handles[ADVANTAGES.name] = self._rows(ADVANTAGES, handles, config)
            learns = self._advantages(handles)
            updated, why_not = self._updated(handles, config)
            if updated is not None:
                objective = self._objective(updated.weights)
                moved = _difference(self._files, self._driver.groups.of("actor").call(_state))
                update = Update(_norm(moved), _cosine(moved, self._moved), _of_actor(updated.metrics))
        before, after = self._scores(self._stored), self._scores(handles)
        both = advantages.index.intersection(learns.index)
        made = self._manifests[UPDATE_ACTOR.name].metrics
        return WhatIf(
            iteration=self._iteration,
            arm=arm.name,
            changed_scores=float((before != after).mean()),
            score=(float(before.mean()), float(after.mean())),
            changed_signs=float((_signs(advantages[both]) != _signs(learns[both])).mean()) if len(both) else 0.0,
            selected=(len(self._selected(self._stored)), len(self._selected(handles))),
            made=Update(_norm(self._moved), _cosine(self._moved, self._moved), _of_actor(made)),
            update=update,
            why_not=why_not,
            objective=objective,
        )

    # The stages.

    def _of_stored(self) -> dict[str, StageHandle]:
        """Returns the stages that the run has committed, except updates."""
        stages = {name: manifest for name, manifest in self._manifests.items() if manifest.shards}
        return {name: StageHandle.of(manifest) for name, manifest in stages.items()}

    def _scored(self, config: RunConfig) -> tuple[dict[str, StageHandle], str]:
        """Returns the stages before the advantages, computed again where the arm changes them, and why the update
        cannot be computed; empty if it can."""
        names = names_of(config)
        handles = {name: handle for name, handle in self._stored.items() if name in names}
        if SCORE.config.differences(self._manifests[SCORE.name].config, config):
            handles[SCORE.name] = self._rows(SCORE, handles, config)
        if FILTER_GROUPS.name in names:
            handles[FILTER_GROUPS.name] = self._rows(FILTER_GROUPS, handles, config)
        handles.pop(ADVANTAGES.name, None)
        ids = set(self._selected(handles))
        for name in ("ref_log_probs", "teacher_log_probs", "values", "greedy_baseline", "turn_values"):
            if name in handles and (unknown := ids - set(self._ids(handles[name]))):
                return handles, f"it selects {len(unknown)} trajectories without stored {name}"
        if OLD_LOG_PROBS.name in names:
            old = handles.get(OLD_LOG_PROBS.name)
            more = "sum_pi_squared" in config.needs and "sum_pi_squared" not in self._own.needs
            if old is None or more or not ids <= set(self._ids(old)):
                handles[OLD_LOG_PROBS.name] = self._rows(OLD_LOG_PROBS, handles, config)
        return handles, ""

    def _rows(self, stage: RowsStage[C, S], handles: Mapping[str, StageHandle], config: RunConfig) -> StageHandle:
        """Computes a stage, and keeps its rows in memory."""
        driver, inputs = self._driver, stage.inputs_of(handles)
        shards = range(len(self._manifests[GENERATE.name].shards) if stage.sharded else 1)
        kept = []
        for number in shards:
            call = call_of(
                driver, stage, self._iteration, inputs, shard=number, config=stage.config.of(config), began=self._began
            )
            request = RowsCall(call, stage.compute, stage.writes)
            group = driver.groups.of(stage.role)
            [output], _ = on_worker(driver, call.needs, partial(group.call, Worker.computed, [request]))
            kept.append(self._store.keep(output.batch.table))
        template = self._manifests[GENERATE.name]
        return StageHandle.of(template.model_copy(update={"stage": stage.name, "shards": tuple(kept)}))

    def _updated(self, handles: Mapping[str, StageHandle], config: RunConfig) -> tuple[Updated | None, str]:
        """Takes the actor's update; returns it, or why there is none."""
        driver, inputs = self._driver, UPDATE_ACTOR.inputs_of(handles)
        stage = UPDATE_ACTOR.config.of(config)
        call = call_of(driver, UPDATE_ACTOR, self._iteration, inputs, config=stage, began=self._began)
        group = driver.groups.of(UPDATE_ACTOR.role)
        try:
            request = UpdateCall(call, UPDATE_ACTOR.compute)
            return on_worker(driver, call.needs, partial(group.call, Worker.update, request)), ""
        except NotFinite as error:
            return None, str(error).partition(";")[0]

    # The weights.

    def _state_of(self, weights: Weights) -> dict[str, bytes]:
        """Returns the files of the actor's state with stored weights."""
        ensure_weights(self._driver, "actor", weights)
        return self._driver.groups.of("actor").call(_state)

    def _load(self, files: Mapping[str, bytes], weights: Weights) -> None:
        self._driver.groups.of("actor").call(_load, files, weights)

    # The rows.

    def _table(self, handle: StageHandle, *columns: str) -> pa.Table:
        shards = handle.manifest().shards
        return pa.concat_tables([self._store.read_shard(shard, ("trajectory_id", *columns)) for shard in shards])

    def _ids(self, handle: StageHandle) -> list[str]:
        ids: list[str] = self._table(handle)["trajectory_id"].to_pylist()
        return ids

    def _selected(self, handles: Mapping[str, StageHandle]) -> list[str]:
        """Returns the ids of the trajectories to learn from."""
        return self._ids(handles[FILTER_GROUPS.name if FILTER_GROUPS.name in handles else GENERATE.name])

    def _scores(self, handles: Mapping[str, StageHandle]) -> pd.Series[float]:
        frame = self._table(handles[SCORE.name], "score").to_pandas()
        return pd.Series(frame["score"].to_numpy(dtype=np.float64), index=frame["trajectory_id"])

    def _advantages(self, handles: Mapping[str, StageHandle]) -> pd.Series[float]:
        """Returns the mean advantage of each trajectory's tokens in the loss."""
        frame = self._table(handles[ADVANTAGES.name], "advantages", "loss_mask").to_pandas()
        means = [mean_in_loss(*row) for row in zip(frame["advantages"], frame["loss_mask"], strict=True)]
        return pd.Series(means, index=frame["trajectory_id"], dtype=float)

    # The estimate.

    def _trajectories_of_next(self) -> pd.DataFrame | None:
        """Returns the trajectories that the run's update generated, by id; None without any."""
        after = self._iteration + 1
        if after > self._run.state.iteration or not {GENERATE.name, SCORE.name} <= self._store.manifests(after).keys():
            return None
        rows = own_answers(self._run.trajectories(after, NEXT))
        whole = rows["rollout_error"].isna() & rows["reward_error"].isna() & ~rows["by_expert"].fillna(False)
        rows = rows[whole & (rows["policy_version"] == after)]
        ids = rows["trajectory_id"].map(trajectory_of)
        return rows.set_index(ids) if len(rows) else None

    def _log_probs_of_next(self, weights: Weights) -> pd.Series[float]:
        """Returns the log-prob of each trajectory of the next iteration under the weights that the actor holds."""
        after, driver = self._iteration + 1, self._driver
        manifest = self._store.manifests(after)[GENERATE.name]
        inputs = {GENERATE.name: StageHandle.of(manifest)}
        config = OLD_LOG_PROBS.config.of(self._own)
        group = driver.groups.of("actor")
        sums: list[pd.Series[float]] = []
        for number, shard in enumerate(manifest.shards):
            call = call_of(driver, OLD_LOG_PROBS, after, inputs, shard=number, config=config, began=self._began)
            request = RowsCall(replace(call, weights=weights), OLD_LOG_PROBS.compute, OLD_LOG_PROBS.writes)
            [output], _ = group.call(Worker.computed, [request])
            drawn = self._store.read_shard(shard, ("trajectory_id", "response_mask")).to_pandas()
            log_probs = output.batch.list("old_log_probs")
            pairs = zip(log_probs, drawn["response_mask"], strict=True)
            of_rows = [float(np.dot(np.asarray(values, dtype=np.float64), mask)) for values, mask in pairs]
            sums.append(pd.Series(of_rows, index=drawn["trajectory_id"].map(trajectory_of)))
        together: pd.Series[float] = pd.concat(sums).groupby(level=0).sum()
        return together

    def _objective(self, weights: Weights) -> Estimate | None:
        """Estimates the run's mean score under the weights that the actor holds."""
        rows, made = self._next, self._next_log_probs
        if rows is None or made is None:
            return None
        ratios = (self._log_probs_of_next(weights) - made)[rows.index]
        scores, log_ratios = np.asarray(rows["score"], dtype=np.float64), np.asarray(ratios, dtype=np.float64)
        return estimated(scores, log_ratios, np.asarray(rows["prompt_id"], dtype=np.str_))


def _state(worker: Worker) -> dict[str, bytes]:
    """Returns the files of the actor's state."""
    return worker.engines.state_of("actor").state()


def _load(worker: Worker, files: Mapping[str, bytes], weights: Weights) -> None:
    """Loads files of the actor's state, and labels the tensors with `weights`."""
    from ratchet.rlhf.weights.stored_state import StoredState

    worker.engines.model("actor", learns=True).load_state(StoredState.of(files))
    worker.mark_as_version("actor", weights)


def _difference(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    """Returns the difference of each tensor of two states."""
    from ratchet.rlhf.weights.stored_state import StoredState

    then = StoredState.of(before).weights
    return {name: tensor - then[name].whole() for name, tensor in StoredState.of(after).tensors()}


def _dot(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    return sum(float((tensor.double() * other[name].double()).sum()) for name, tensor in one.items())


def _norm(change: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(_dot(change, change))


def _cosine(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float | None:
    lengths = _norm(one) * _norm(other)
    return _dot(one, other) / lengths if lengths else None


def _signs(advantages: pd.Series[float]) -> NDArray[np.float64]:
    values = advantages.to_numpy(dtype=np.float64)
    return np.where(np.abs(values) < NO_ADVANTAGE, 0.0, np.sign(values))


def _of_actor(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("actor/")}
