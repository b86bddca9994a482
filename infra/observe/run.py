"""Writes the steps of another trainer to a run: the same log, files and rules as those of Ratchet's own runs."""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import JsonValue

from ratchet.infra.execution.claims import begin, claim, run_url
from ratchet.infra.execution.heartbeat import Heartbeat
from ratchet.infra.execution.standing import parent_of
from ratchet.infra.execution.stopping import Stopping
from ratchet.infra.observe.rows import (
    GENERATE,
    SCORE,
    Rows,
    aligned,
    as_rows,
    check_names,
    generated,
    metrics_of,
    of_trajectories,
)
from ratchet.infra.runs.forks import fork
from ratchet.infra.store.clock import now
from ratchet.infra.store.images import Images
from ratchet.infra.store.log import RunLog
from ratchet.infra.store.manifest import Fingerprint, Manifest
from ratchet.infra.store.object_store import ObjectStore, StoreUnavailable
from ratchet.infra.store.records import Commit, RunState, ShardCommit, StageCommit
from ratchet.infra.store.run_store import VALIDATE, RunStore
from ratchet.rlhf.config import RunConfig, parse_config, stored_config
from ratchet.rlhf.config.published import LEFT_OUT, SECRET
from ratchet.rlhf.config.sections import UNKNOWN_MODEL
from ratchet.rlhf.errors import RatchetError, UserError, counted, in_one_line
from ratchet.rlhf.metrics import STEP, validation_metrics
from ratchet.rlhf.validation import means, sums

OPEN_S = 10.0
"""Seconds that a trainer waits for mistakes in the settings of its run, such as a store that refuses to be written."""
QUEUE = 64
"""Steps that wait in memory for the store; further ones are left out."""
BEFORE = -1
"""The number of a step in whose place two validations precede all steps."""
PAUSE_S = 5.0
"""Seconds between attempts to write to a store that does not answer."""
CLOSE_S = 60.0
"""Seconds that a trainer's end waits for steps that are not written yet."""


@dataclass
class Step:
    """What is written of a step."""

    number: int
    stages: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    digest: str = ""
    """sha256 of the files' content from which it was imported."""


@dataclass
class Validation:
    """Answers to held-out prompts, by the weights after the last step."""

    rows: list[dict[str, Any]]
    number: int | None
    """The trainer's number of that step; None: that of the run's last step."""
    digest: str = ""


def observed_config(
    name: str,
    store: str,
    trainer: str,
    config: Mapping[str, Any] | None = None,
    model: str | None = None,
    iterations: int | None = None,
) -> RunConfig:
    """Makes the config of a run that another trainer computes. See `start`."""
    return parse_config(
        {
            "run": {"name": name, "store": store},
            "model": {"path": model or UNKNOWN_MODEL},
            "data": {"train": []},
            "reward": {"function": None, "on_error": "drop"},
            "algorithm": {"advantage": "reinforce_plus_plus", "kl": {"in_reward": None}},
            "critic": None,
            "observed": {"trainer": trainer, "config": _plain(config or {}), "iterations": iterations},
        },
        "ratchet.observe",
    )


def _plain(value: Any, key: str = "") -> Any:
    """Copies a config as JSON, without the values of keys that are named like secrets."""
    if SECRET.search(key) and value:
        return LEFT_OUT
    if isinstance(value, Mapping):
        return {str(inner): _plain(content, str(inner)) for inner, content in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(content) for content in value]
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    return value if isinstance(value, str | int | bool) or value is None else str(value)


class StepWriter:
    """Commits steps to a run, one after the other. A step that failed with `StoreUnavailable` may be given again."""

    def __init__(self, config: RunConfig) -> None:
        """Takes the run's config; see `observed_config`. Writes nothing."""
        assert config.observed is not None
        self._config = config
        self._store: RunStore | None = None
        self._heartbeat: Heartbeat | None = None
        self._stopping = Stopping("its trainer")
        self._begun: dict[int, int] = {}
        """The iteration of each step that this writer was given."""
        self._child: ObjectStore | None = None
        """A fork that was begun."""

    @property
    def store(self) -> RunStore:
        assert self._store is not None, "open comes first"
        return self._store

    @property
    def source(self) -> str:
        assert self._config.observed is not None
        return self._config.observed.trainer

    def open(self) -> None:
        """Claims the newest attempt of the run; creates the run if there is none.

        Raises:
            UserError: the run is one of Ratchet's own, or of another trainer, or the store refuses to be written.
            Fenced: another process writes the run.
        """
        newest, _ = _attempts(run_url(self._config.run.store, self._config.run.name))
        self._claim(RunStore.at(newest))

    def _claim(self, store: RunStore) -> None:
        self.close()
        config = self._config.with_values({"run.name": store.url.rpartition("/")[2]})
        state = begin(store, config, take_over=False)
        if state.claim is not None:
            stored = stored_config(state.claim.config, f"{store.url}, newest claim").observed
            if stored is None or stored.trainer != self.source:
                whose = "Ratchet's own" if stored is None else f"{stored.trainer}'s"
                raise UserError(f"{store.url} is {whose} run, and {self.source} would write to it: choose another name")
        claim(store, config, initial={}, computes=False)
        store.sweep((*state.stages, *state.shards))
        self._store = store
        self._heartbeat = Heartbeat(store.log, self._stopping)
        if _trained(store.state):  # a writer that was killed has committed all of this step but its end
            store.close(self._committed_metrics(store.state.iteration))

    def close(self, failure: str | None = None) -> None:
        """Ends the claim; `failure` is the error that ended the trainer."""
        if self._heartbeat is not None:
            self._heartbeat.close(failure)
            self._heartbeat = None

    def finish(self) -> None:
        """Records that the run has all of its steps."""
        done = self.store.state.iteration
        if self._config.observed is not None and self._config.observed.iterations != done:
            config = self._config.with_values(
                {"run.name": self.store.url.rpartition("/")[2], "observed.iterations": done}
            )
            claim(self.store, config, initial={}, computes=False)

    def imported(self) -> tuple[dict[int, str], set[str]]:
        """Returns the digest of what each step was imported from, by the step's number, and those of validations."""
        store, steps, validations = self.store, dict[int, str](), set[str]()
        for iteration in range(store.state.iteration + 1):
            state = store.iteration_state(iteration)
            if isinstance(validated := state.stages.get(VALIDATE), StageCommit):
                validations.add(validated.fingerprint)
            stages = _trained(state)
            if iteration < store.state.iteration and (stages or validated is None):
                steps[int(state.metric_values[STEP])] = min((stage.fingerprint for stage in stages), default="")
        return steps, validations

    def commit(self, step: Step) -> None:
        """Commits a step: its stages, then its metrics, which close the iteration.

        If the trainer repeats steps that the run has, because it resumed from an older checkpoint, the step begins a
        fork of the run, which shares what came before it.

        Raises:
            UserError: rows have other columns or types than the schema.
            Fenced: another process writes the run.
            Deleted: the run was deleted.
            StoreUnavailable: it is unknown what was committed; repeat the call.
        """
        self._stopping.check()
        if step.number not in self._begun:
            self._fork_before(step.number)
            self._begun = {step.number: self.store.state.iteration}
        iteration = self._begun[step.number]
        if self.store.state.iteration > iteration:  # an earlier call has committed it after all
            return
        own = {**step.metrics, STEP: float(step.number)}
        self._write(iteration, _tables(step, iteration, self.source, Images(self.store.objects).put), step.digest, own)
        self.store.close(self._committed_metrics(iteration) | own, has_stages=bool(step.stages))

    def validate(self, validation: Validation) -> None:
        """Commits a validation to the open iteration. If that has one, closes it first. Raises as `commit`."""
        self._stopping.check()
        iteration = self.store.state.iteration
        if VALIDATE in self.store.state.stages:
            number = validation.number
            if number is None:
                number = self._step_of(iteration - 1) if iteration else BEFORE
            self.store.close(self._committed_metrics(iteration) | {STEP: float(number)})
            iteration += 1
        put = Images(self.store.objects).put
        table = _validation_table(validation.rows, iteration, self.source, put)
        self._write(iteration, {VALIDATE: table}, validation.digest)

    def _committed_metrics(self, iteration: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for manifest in self.store.manifests(iteration).values():
            metrics |= manifest.metrics
        return metrics

    def _write(
        self, iteration: int, tables: Mapping[str, pa.Table], digest: str, own: Mapping[str, float] | None = None
    ) -> None:
        """Commits stages in one record. The last one has the trainer's `own` metrics, which take precedence."""
        store, commits, began = self.store, list[Commit](), now()
        for number, (stage, table) in enumerate(tables.items(), 1):
            if stage in store.state.stages:  # by an earlier call
                continue
            metrics = _validated(table) if stage == VALIDATE else metrics_of(stage, table)
            metrics |= own or {} if number == len(tables) else {}
            attempt = store.begin_attempt(iteration, stage)
            data = store.write_shard(iteration, stage, attempt, 0, table)
            ended = now()
            manifest = Manifest(
                iteration=iteration,
                stage=stage,
                term=store.log.term,
                attempt=attempt,
                fingerprint=Fingerprint(parts={"stage": stage, "iteration": iteration, "source": digest}),
                config={},
                columns=tuple(table.column_names),
                shards=(data,),
                metrics=metrics,
                began=began,
                ended=ended,
            )
            shard = ShardCommit(
                iteration=iteration, stage=stage, shard=0, term=store.log.term, data=data, seconds=ended - began
            )
            ref = store.write_manifest(manifest)
            commits += [shard, StageCommit(iteration=iteration, stage=stage, manifest=ref, fingerprint=digest)]
        if commits:
            store.commit(*commits)

    def _fork_before(self, number: int) -> None:
        """Continues in a fork if the run has this step already."""
        store, iteration = self.store, self.store.state.iteration
        while iteration and self._step_of(iteration - 1) >= number:
            iteration -= 1
        if iteration == store.state.iteration:
            return
        if self._child is None:
            _, free = _attempts(run_url(self._config.run.store, self._config.run.name))
            self._child = ObjectStore(free)
            _tell(
                f"{self.source} repeats step {number}, which {store.url.rpartition('/')[2]} has: "
                f"{free.rpartition('/')[2]} shares what came before it, and gets the steps from there on"
            )
        child = self._child
        if RunLog(child).read().slot < 0:
            config = self._config.with_values({"run.name": child.url.rpartition("/")[2]}).model_dump(mode="json")
            fork(store, child, config, iteration, (), str(iteration))
        self._claim(RunStore(child))
        self._child = None

    def _step_of(self, iteration: int) -> int:
        index = self.store.log.load_index(self.store.index_of(iteration))
        return int(index.metric_values[STEP])


def _trained(state: RunState) -> list[StageCommit]:
    """Returns the commits of an iteration's stages but for that of its validation."""
    return [stage for name, stage in state.stages.items() if name != VALIDATE and isinstance(stage, StageCommit)]


def _attempts(url: str) -> tuple[str, str]:
    """Returns the newest attempt of a run, which is the run itself or a fork ``NAME-2``, and the URL of a further one.

    A run that is named so, but is no fork of the run, is left alone.
    """
    names, newest, number = {url.rpartition("/")[2]}, url, 2
    while (log := RunLog(ObjectStore(f"{url}-{number}"))).read().slot >= 0:
        if parent_of(log) in names:
            newest = log.objects.url
            names.add(newest.rpartition("/")[2])
        number += 1
    return newest, f"{url}-{number}"


def _tell(text: str) -> None:
    """Tells the user of a trainer, whose process may show no notes of Ratchet's."""
    print(f"ratchet: {text}", file=sys.stderr, flush=True)


def _tables(step: Step, iteration: int, source: str, put: Callable[[bytes], str]) -> dict[str, pa.Table]:
    tables: dict[str, pa.Table] = {}
    ids: list[str] = []
    tokens: list[int | None] = []
    for stage, rows in step.stages.items():
        if stage == GENERATE:
            table = generated(rows, iteration, source, put)
            ids = table["trajectory_id"].to_pylist()
            has_tokens = "response_ids" in table.column_names
            tokens = pc.list_value_length(table["response_ids"]).to_pylist() if has_tokens else [None] * len(ids)
        else:
            table = aligned(stage, rows, ids, tokens)
        tables[stage] = table
    return tables


def _validation_table(
    rows: Sequence[Mapping[str, Any]], iteration: int, source: str, put: Callable[[bytes], str]
) -> pa.Table:
    scored = ("score", "reward_parts", "reward_error")
    table = generated([{k: v for k, v in row.items() if k not in scored} for row in rows], iteration, source, put)
    ids = table["trajectory_id"].to_pylist()
    scores = aligned(SCORE, [{k: row.get(k) for k in scored if k in row} for row in rows], ids, [None] * len(ids))
    for name in scores.column_names:
        if name != "trajectory_id":
            table = table.append_column(name, scores[name])
    return table


def _validated(table: pa.Table) -> dict[str, float]:
    """Computes the metrics of a validation, as Ratchet's own have them."""
    if "score" not in table.column_names:
        return {}
    rows = [
        row
        for row in of_trajectories(table).select(["data_source", "prompt_id", "response", "score"]).to_pylist()
        if row["score"] is not None
    ]
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row["prompt_id"]] = sizes.get(row["prompt_id"], 0) + 1
    n = max(sizes.values(), default=1)
    columns = ([row[name] for row in rows] for name in ("data_source", "prompt_id", "response", "score"))
    sources, prompts, responses, scores = columns
    metrics: dict[str, float] = {}
    for source, statistics in means([sums(sources, prompts, responses, scores, n)]).items():
        metrics |= validation_metrics(source, statistics, n)
    return metrics


class ObservedStep:
    """A step that is being written: nothing of it is stored before `close`."""

    def __init__(self, run: ObservedRun, number: int) -> None:
        self._run = run
        self._step = Step(number)

    def write(self, stage: str, rows: Rows) -> Self:
        """Adds the rows of a stage, one per trajectory.

        Args:
            stage: one of Ratchet's (docs/columns.md), of which `generate` comes first, or a name of your own, whose
                rows may have any columns.
            rows: mappings, a pandas frame or an Arrow table. Those of stages after `generate` are in its order, or name
                their trajectory by `trajectory_id`. They must not be changed afterwards.

        Returns:
            This step.

        Raises:
            UserError: the stage has no such columns, was written already, or comes before `generate`.
        """
        held = as_rows(rows)
        if stage in self._step.stages:
            raise UserError(f"step {self._step.number} has its {stage} already")
        if stage == VALIDATE:
            raise UserError("a validation belongs to no step: run.validation(rows) writes it")
        if stage != GENERATE and GENERATE not in self._step.stages:
            raise UserError(f"step {self._step.number}: write generate before {stage}")
        check_names(stage, held)
        self._step.stages[stage] = held
        return self

    def metrics(self, values: Mapping[str, float]) -> Self:
        """Adds metrics; those that Ratchet has, too, by its names (docs/metrics.md). Returns this step."""
        self._step.metrics |= {name: float(value) for name, value in values.items()}
        return self

    def close(self) -> None:
        """Hands the step over to be stored. Does not wait."""
        self._run._give(self._step)


class ObservedRun:
    """A run that a trainer writes while it trains; `start` opens it.

    A thread writes the steps, so that the trainer waits for nothing. If the store does not answer, steps wait in memory
    (at most `QUEUE`), and a note says so. Use it from one thread, and from one process of the trainer.
    """

    def __init__(self, config: RunConfig) -> None:
        """Starts to write a run; see `start`."""
        self._name = config.run.name
        self._writer = StepWriter(config)
        self._waiting: queue.Queue[Step | Validation | None] = queue.Queue(QUEUE + 1)
        self._last: int | None = None
        self._left_out = 0
        self._opened = threading.Event()
        self._refused: RatchetError | None = None
        self._deadline = float("inf")
        self._finished = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._work, name="ratchet-observe", daemon=True)
        self._thread.start()
        if self._opened.wait(OPEN_S) and self._refused is not None:
            raise self._refused
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(
            finished=error is None, failure=None if error is None else in_one_line(error) or type(error).__name__
        )

    @property
    def url(self) -> str:
        """The run's folder; that of its newest attempt, once a step was repeated."""
        return self._writer.store.url

    def step(self, number: int) -> ObservedStep:
        """Begins a step of the trainer.

        Args:
            number: the trainer's own number of it, which grows from step to step. A trainer that was resumed may repeat
                numbers of an earlier process: they begin a fork of the run.

        Raises:
            UserError: this process has written this step, or a later one.
        """
        if self._last is not None and number <= self._last:
            raise UserError(f"step {number} comes after step {self._last}: the numbers of steps grow")
        self._last = number
        return ObservedStep(self, number)

    def validation(self, rows: Rows) -> None:
        """Stores answers to held-out prompts, by the weights after the last step.

        Args:
            rows: columns of `generate`, and `score`, `reward_parts` and `reward_error`.

        Raises:
            UserError: there are other columns.
        """
        held = as_rows(rows)
        check_names(VALIDATE, held)
        self._give(Validation(held, self._last))

    def attempt(self, work: Callable[[], object]) -> None:
        """Does something for the run in a trainer's hook. An error ends the run with a note, and not the trainer."""
        if self._refused is not None:
            return
        try:
            work()
        except Exception as error:
            said = str(error) if isinstance(error, RatchetError) else f"{type(error).__name__}: {in_one_line(error)}"
            _tell(f"{self._name} gets no further steps: {said}")
            self.close(failure=said)
            self._refused = RatchetError(said)

    def close(self, finished: bool = False, failure: str | None = None) -> None:
        """Waits until everything is stored, at most `CLOSE_S` seconds, and ends.

        Args:
            finished: the run has all of its steps.
            failure: the error that ended the trainer, for `ratchet ls`.
        """
        if not self._thread.is_alive():
            return
        self._finished, self._failure = finished, failure
        self._deadline = time.monotonic() + CLOSE_S
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(CLOSE_S + PAUSE_S)
        atexit.unregister(self.close)

    def _give(self, item: Step | Validation) -> None:
        if self._refused is not None:
            return
        if self._waiting.qsize() >= QUEUE:
            if not self._left_out:
                _tell(f"{self._name}: the store does not answer, and {QUEUE} steps wait: further ones are left out")
            self._left_out += 1
            return
        self._waiting.put_nowait(item)

    def _work(self) -> None:
        """Writes until the run is closed. No error leaves this thread, because the trainer must go on."""
        try:
            self._patiently(self._writer.open, "is not open yet")
            self._opened.set()
            while (item := self._waiting.get()) is not None:
                self._store(item)
            if self._finished:
                self._patiently(self._writer.finish, "is not complete")
        except RatchetError as error:
            self._refused = error
            if self._opened.is_set():
                _tell(f"{self._name} gets no further steps: {error}")
        except Exception as error:
            self._refused = RatchetError(f"{type(error).__name__}: {in_one_line(error)}")
            _tell(f"{self._name} gets no further steps: {self._refused}")
        finally:
            self._opened.set()
            if self._left_out:
                _tell(f"{self._name}: {counted(self._left_out, 'step')} left out, because the store did not answer")
            with suppress(Exception):
                self._writer.close(self._failure)

    def _store(self, item: Step | Validation) -> None:
        what = f"step {item.number}" if isinstance(item, Step) else "a validation"
        try:
            if isinstance(item, Step):
                self._patiently(lambda: self._writer.commit(item), f"waits to store {what}")
            else:
                self._patiently(lambda: self._writer.validate(item), f"waits to store {what}")
        except UserError as error:
            _tell(f"{self._name}: {what} is not stored: {error}")

    def _patiently(self, work: Callable[[], object], waits: str) -> None:
        """Does something again and again until the store answers, or the time after `close` is up."""
        said = False
        while True:
            try:
                work()
            except StoreUnavailable as error:
                if time.monotonic() + PAUSE_S > self._deadline:
                    raise
                if not said:
                    _tell(f"{self._name} {waits}: {error}")
                    said = True
                time.sleep(PAUSE_S)
            else:
                return


def start(
    name: str,
    store: str = "file://./runs",
    *,
    trainer: str,
    config: Mapping[str, JsonValue] | None = None,
    model: str | None = None,
    iterations: int | None = None,
) -> ObservedRun:
    """Begins to write a run that another trainer computes, or continues it.

    Args:
        name: the run's name in the store.
        store: folder of runs: any fsspec URL.
        trainer: the trainer's name, such as ``trl``.
        config: its own settings, for people; values of keys that are named like secrets are left out.
        model: the model that it trains, a folder or a name on the hub, whose tokenizer shows tokens.
        iterations: the number of steps that it will make, if that is known.

    Returns:
        The run, to which `ObservedRun.step` adds.

    Raises:
        UserError: the run is one of Ratchet's own or of another trainer, or the store refuses to be written.
        Fenced: another process writes the run.
    """
    return ObservedRun(observed_config(name, store, trainer, config, model, iterations))
