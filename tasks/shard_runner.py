"""Computes the rows of a stage, shard by shard, and commits each shard as soon as it is complete."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Self

from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.progress import StageProgress, note, report
from ratchet.infra.store.clock import now
from ratchet.infra.store.log import Late
from ratchet.infra.store.manifest import Manifest
from ratchet.infra.store.records import Assigned, Journal, ShardCommit, StageCommit
from ratchet.infra.workers.calls import C, ComputedShard, RowsCall, S
from ratchet.infra.workers.worker import Worker
from ratchet.tasks.failures import told
from ratchet.tasks.fingerprints import changes_since_term, fingerprint_of
from ratchet.tasks.generation_runner import GenerationRunner
from ratchet.tasks.leases import Leases
from ratchet.tasks.pipeline import stages_of
from ratchet.tasks.restore import publish
from ratchet.tasks.stage import RowsStage, Until
from ratchet.tasks.worker_calls import Handles, call_of, on_worker

LOOK_S = 0.3
"""Seconds between two looks at the log while other processes generate the rest of a stage."""
ROWS_PER_RANK = 32
"""Average number of rows of a rank that are computed together at most: a crash loses their work. With fewer, ranks wait
for each other longer; see docs/decisions/040-shards-are-computed-together.md."""


def run_rows(
    driver: Driver, stage: RowsStage[C, S], iteration: int, inputs: Handles, handle: StageHandle
) -> tuple[Manifest, bool]:
    store = driver.store
    total = _shards(driver, stage, inputs)
    committed = store.committed_stage(iteration, stage.name)
    if committed is not None:
        assert isinstance(committed, StageCommit), "rows are not skipped"
        report(StageProgress(iteration=iteration, stage=stage.name, done=total, total=total))
        return store.manifest(committed), True

    attempt, began = store.begin_attempt(iteration, stage.name), now()
    until = DynamicSampling[C, S].of(driver, stage, iteration)
    committed_shards = store.committed_shards(stage.name, iteration)
    done = {number: shard for number, shard in committed_shards.items() if number < total}
    beyond = [shard.data.key for number, shard in committed_shards.items() if number >= total]
    if until is None:
        # with a stop condition, the shards that count are only known at the end
        handle.expect(total)
        handle.show({number: shard.data for number, shard in done.items()})
    job = ShardJob(driver, stage, iteration, inputs, attempt, total, handle)
    is_shared = stage.shared and driver.config.rollout.workers
    if is_shared:
        publish(driver, driver.state.starting["actor"])
        computed = shared(job, done)
    else:
        computed = _generated(job, done, until) if stage.begin is not None else _computed(job, done)
    uncommitted: list[ShardCommit] = []
    report(StageProgress(iteration=iteration, stage=stage.name, done=len(done), total=total))
    for shards in computed:
        done |= {shard.shard: shard for shard in shards}
        if is_shared:  # they are committed
            handle.show({number: shard.data for number, shard in done.items()})
            continue
        if until is None and len(done) == total:
            # the last shards are committed with the stage, below
            uncommitted = shards
            break
        store.commit(*shards)
        if until is None:
            handle.show({number: done[number].data for number in done})
        report(StageProgress(iteration=iteration, stage=stage.name, done=len(done), total=total))
    counted = [done[number] for number in range(total if until is None else until.count(done))]

    manifest = Manifest(
        iteration=iteration,
        stage=stage.name,
        term=driver.term,
        attempt=attempt,
        fingerprint=fingerprint_of(driver, stage, iteration, inputs),
        config=stage.config.values(driver.config),
        columns=("trajectory_id", *(column.name for column in stage.writes)),
        shards=tuple(shard.data for shard in counted),
        metrics=stage.metrics_of([shard.outputs for shard in counted]),
        seconds=sum(shard.seconds for shard in counted),
        began=began,
        ended=now(),
    )
    last = stage.summary.model_validate(counted[-1].outputs)
    commit = StageCommit(
        iteration=iteration,
        stage=stage.name,
        manifest=store.write_manifest(manifest),
        fingerprint=manifest.fingerprint.digest,
        cursor=last.cursor,
        controllers=last.controllers,
    )
    journals = store.journals(iteration, stage.name)
    store.commit(*uncommitted, commit)  # one record, so that the last shard is never committed without its stage
    store.delete_journals(journals)
    if is_shared:  # what rollout workers wrote too late, or died before they committed it
        store.objects.delete(store.uncommitted(iteration, stage.name))
    # the committed rows replace the recorded answers and turns
    if stage.begin is not None and driver.config.rollout.partner is not None:
        store.delete_calls(iteration, stage.name)
    # what dynamic sampling drew and does not need
    store.objects.delete([*beyond, *(shard.data.key for number, shard in done.items() if number >= len(counted))])
    report(StageProgress(iteration=iteration, stage=stage.name, done=total, total=total, metrics=manifest.metrics))
    for text in told(store, driver.config, manifest):
        note(text)
    return manifest, False


def _shards(driver: Driver, stage: RowsStage[C, S], inputs: Handles) -> int:
    """Returns the number of shards of a stage; the maximum, for a stage with a stop condition."""
    if not stage.sharded:
        return 1
    return stage.count(driver) if stage.count is not None else next(iter(inputs.values())).count()


@dataclass(frozen=True)
class ShardJob(Generic[C, S]):
    """A stage of an iteration that computes shards."""

    driver: Driver
    stage: RowsStage[C, S]
    iteration: int
    inputs: Handles
    attempt: int
    total: int
    """Number of shards; the maximum, for a stage with a stop condition."""
    handle: StageHandle

    def check(self) -> None:
        """Raises if the driver is asked to stop, or if the result would be useless."""
        self.driver.stopping.check()
        self.handle.check()

    def report(self, done: Sized, generation: GenerationRunner[C, S]) -> None:
        report(
            StageProgress(
                iteration=self.iteration,
                stage=self.stage.name,
                done=len(done),
                total=self.total,
                in_flight=generation.in_flight,
            )
        )

    def request(self, shard: int) -> RowsCall[C, S]:
        stage = self.stage
        call = call_of(self.driver, stage, self.iteration, self.inputs, shard=shard, attempt=self.attempt)
        return RowsCall(call, stage.compute, stage.writes, stage.begin)

    def compute(self, shards: Sequence[int]) -> list[ShardCommit]:
        """Computes shards together, up to the first one that is not finite; the caller commits them."""
        self.check()
        requests, group = [self.request(shard) for shard in shards], self.driver.groups.of(self.stage.role)
        computed = on_worker(self.driver, requests[0].call.needs, lambda: group.call(Worker.rows, requests))
        return [self.commit(shard, rows, rows.seconds) for shard, rows in zip(shards, computed, strict=False)]

    def next_shards(self, done: Container[int]) -> list[int]:
        """Chooses the shards of the next call, at least one that is not in `done`; waits for the inputs of the first
        one.
        """
        stage = self.stage
        sources = [handle for name, handle in self.inputs.items() if stage.reads_shard_of(name)]
        if not sources:
            return [next(number for number in range(self.total) if number not in done)]
        # ranks wait for each other at the end of each call, so several ranks take as many shards as are ready
        ranks = self.driver.groups.of(stage.role).ranks if stage.infers else 1
        enough = ROWS_PER_RANK * ranks if ranks > 1 else 0
        chosen: list[int] = []
        rows = 0
        for number, shard in sources[0].shards(beside=done).items():
            if not chosen or (rows < enough and all(source.has(number) for source in sources)):
                chosen.append(number)
                rows += shard.rows
        return chosen

    def commit(self, shard: int, rows: ComputedShard[S], seconds: float) -> ShardCommit:
        assert rows.shard is not None, "rank 0 answers"
        return ShardCommit(
            iteration=self.iteration,
            stage=self.stage.name,
            shard=shard,
            term=self.driver.term,
            data=rows.shard,
            seconds=seconds,
            outputs=rows.summary.model_dump(mode="json", exclude_defaults=True),
        )


def _computed(job: ShardJob[C, S], done: Mapping[int, ShardCommit]) -> Iterator[list[ShardCommit]]:
    """Computes the shards that are not in `done`, as their inputs are committed."""
    while len(done) < job.total:
        for shard in job.compute(job.next_shards(done)):
            yield [shard]


def _generated(
    job: ShardJob[C, S], done: Mapping[int, ShardCommit], until: DynamicSampling[C, S] | None
) -> Iterator[list[ShardCommit]]:
    """Generates the shards that are not in `done` concurrently; they complete in any order. Yields those that are
    complete at the same time together."""
    driver, stage = job.driver, job.stage
    _check_journal(driver, stage, job.iteration)
    _adopt_calls(driver, stage, job.iteration)
    pending = deque(number for number in range(job.total) if number not in done)
    began = time.perf_counter()
    with GenerationRunner[C, S](driver, job.iteration, stage.name) as generation:
        while until is None or not until.is_met(done):
            job.check()
            while opening := list(islice(pending, generation.room if until is None else until.room(done, generation))):
                with driver.rollout.weights_lock.reading():
                    # first: the requests take the weights from this record
                    _assign(driver, stage, job.iteration, opening)
                    generation.open([job.request(pending.popleft()) for _ in opening])
            if not pending:
                # the generations of the next iteration may join
                job.handle.no_more_to_begin()
            if not generation.requests:
                return
            if complete := generation.next_complete():
                ended = time.perf_counter()
                seconds = (ended - began) / len(complete)
                yield [job.commit(shard, rows, seconds) for shard, rows in complete.items()]
                began = ended
            generation.journal()
            job.report(done, generation)


def shared(job: ShardJob[C, S], done: Mapping[int, ShardCommit]) -> Iterator[list[ShardCommit]]:
    """Generates shards beside other processes, until all are committed or the stage is over. Commits its own; yields
    those that are committed since the last time, its own and those of others.

    Args:
        done: the committed shards, to which the caller adds what is yielded.
    """
    driver, stage = job.driver, job.stage
    leases = Leases(driver, stage.name, job.iteration, job.total)
    if driver.store.log.worker is None:
        _check_journal(driver, stage, job.iteration)
    began = time.perf_counter()
    with GenerationRunner[C, S](driver, job.iteration, stage.name) as generation:
        if driver.store.log.worker is not None:  # a new driver may not have discarded them yet
            outdated = [journal for journal, _ in _outdated(driver, stage, job.iteration)]
            generation.outdated = frozenset(part for journal in outdated for part in journal.parts)
        looked = -float("inf")
        while len(done) < job.total:
            job.check()
            # not at each report of a replica: a store charges for each look
            if not generation.requests or time.monotonic() - looked >= LOOK_S:
                committed = leases.committed()
                if committed is None:
                    return
                if new := [shard for number, shard in committed.items() if number not in done]:
                    generation.drop([key for key in generation.requests if key[2] in committed])
                    yield new
                    continue
                looked = time.monotonic()
                own = {number for _, _, number in generation.requests}
                if generation.room and (taken := leases.take(done.keys() | own, generation.room)):
                    generation.open([job.request(number) for number in taken])
            if not generation.requests:
                time.sleep(LOOK_S)  # others have the rest
                continue
            if complete := generation.next_complete():
                ended = time.perf_counter()
                seconds = (ended - began) / len(complete)
                for shard, rows in complete.items():
                    _commit_if_first(driver, job.commit(shard, rows, seconds))
                began, looked = ended, -float("inf")
            generation.journal()
            job.report(done, generation)


def _commit_if_first(driver: Driver, shard: ShardCommit) -> None:
    try:
        driver.store.commit(shard)
    except Late:  # another process took it over
        driver.store.objects.delete([shard.data.key])


def _check_journal(driver: Driver, stage: RowsStage[C, S], iteration: int) -> None:
    """Discards journals that were generated under another config, with other data or by other code."""
    for journal, changes in _outdated(driver, stage, iteration):
        note(f"{stage.name} of iteration {iteration} starts without its journal: {'; '.join(changes)}")
        driver.store.replace_journal(journal.model_copy(update={"term": driver.term, "parts": ()}))


def _outdated(driver: Driver, stage: RowsStage[C, S], iteration: int) -> list[tuple[Journal, list[str]]]:
    """Lists the journals that were generated under another config, with other data or by other code, and the changes
    since then."""
    journals = [journal for journal in driver.store.journals(iteration, stage.name) if journal.parts]
    return [(journal, changes) for journal in journals if (changes := changes_since_term(driver, stage, journal.term))]


def _adopt_calls(driver: Driver, stage: RowsStage[C, S], iteration: int) -> None:
    """Commits what earlier drivers stored of agents and durable environments: agents get the same answers again, and
    environments answer no turn again.

    What was stored under another config, with other data or by other code is discarded, and so is what a driver stored
    after a later one had begun.
    """
    if driver.config.rollout.partner is None:
        return
    store = driver.store
    journal = next((own for own in store.journals(iteration, stage.name) if own.worker is None), None)
    parts = [] if journal is None else list(journal.parts)
    discarded: list[str] = []
    # files of drivers that have taken the run over are left alone: this one is about to notice
    by_term = {term: keys for term, keys in store.calls(iteration, stage.name).items() if term <= driver.term}
    newest = max([*by_term, *([] if journal is None else [journal.term])], default=0)
    for term, keys in by_term.items():
        if term < newest:
            # of a driver that woke after a later one had adopted what there was: the later one has not read these, and
            # a turn that it played on would begin again
            discarded += keys
        elif term != driver.term and (changes := changes_since_term(driver, stage, term)):
            note(f"{stage.name} of iteration {iteration} starts without earlier answers: {'; '.join(changes)}")
            discarded += keys
        else:
            parts += [part for key in keys if (part := store.reference(key)) is not None]
    if len(parts) > (0 if journal is None else len(journal.parts)):
        store.commit(Journal(iteration=iteration, stage=stage.name, term=driver.term, parts=tuple(parts)))
    store.objects.delete(discarded)


def _assign(driver: Driver, stage: RowsStage[C, S], iteration: int, shards: Sequence[int]) -> None:
    """Commits the weights that shards will be generated with, if they do not follow from their iteration."""
    loaded = driver.rollout.loaded
    if stage.name != "generate" or loaded is None:
        return
    assigned = driver.store.iteration_state(iteration).assigned
    new = [shard for shard in shards if assigned.get(shard) != loaded]
    if new:
        driver.store.commit(*(Assigned(iteration=iteration, shard=shard, weights=loaded) for shard in new))


class DynamicSampling(Generic[C, S]):
    """Draws prompts until enough are useful.

    The shards that count are the shortest prefix that has enough: they depend on order and scores, never on timing.
    """

    def __init__(self, driver: Driver, stage: RowsStage[C, S], until: Until, iteration: int) -> None:
        self.driver, self.stage, self.until, self.iteration = driver, stage, until, iteration
        store = driver.store
        self._following = [
            follower
            for follower in stages_of(driver.config)
            if follower.name in until.follow and isinstance(follower, RowsStage)
        ]
        self._attempts = {follower.name: store.begin_attempt(iteration, follower.name) for follower in self._following}

    @classmethod
    def of(cls, driver: Driver, stage: RowsStage[C, S], iteration: int) -> Self | None:
        """Returns the stop condition of a stage; None if it has none."""
        until = stage.until
        return None if until is None or not until.applies(driver.config) else cls(driver, stage, until, iteration)

    def count(self, done: Mapping[int, ShardCommit]) -> int:
        """Number of shards that count: the shortest prefix of `done` that has enough, or the whole prefix."""
        prefix = 0
        while prefix in done:
            prefix += 1
            if self._share(range(prefix)) >= 1:
                break
        return prefix

    def is_met(self, done: Mapping[int, ShardCommit]) -> bool:
        """True if a prefix of the shards has enough. Runs the stages that score the shards."""
        for number in sorted(done):
            self._follow(number, done[number])
        count = self.count(done)
        return count > 0 and self._share(range(count)) >= 1

    def room(self, done: Mapping[int, ShardCommit], generation: GenerationRunner[C, S]) -> int:
        """Returns the number of shards to open now: those that are likely to be needed in addition to those that
        run."""
        share = self._share(done)
        per_shard = share / len(done) if share else self.until.expected(self.driver.config)
        room, running, needed = generation.room, len(generation.requests), 0
        while needed < room and share + (running + needed) * per_shard < 1:
            needed += 1
        return needed

    def _share(self, shards: Iterable[int]) -> float:
        """Returns the share of the needed prompts that the shards have; 1: enough."""
        scored = self.driver.store.committed_shards(self._following[-1].name, self.iteration)
        return self.until.share(self.driver.config, [scored[number].outputs for number in shards])

    def _follow(self, number: int, shard: ShardCommit) -> None:
        handles = {self.stage.name: StageHandle.so_far(self.stage.name, {number: shard.data})}
        store, config = self.driver.store, self.driver.config
        for follower in self._following:
            committed = store.committed_shards(follower.name, self.iteration).get(number)
            if committed is None:
                job = ShardJob(
                    driver=self.driver,
                    stage=follower,
                    iteration=self.iteration,
                    inputs=follower.inputs_of(handles),
                    attempt=self._attempts[follower.name],
                    total=config.max_prompts,
                    handle=handles[self.stage.name],
                )
                [committed] = job.compute([number])
                store.commit(committed)
            handles[follower.name] = StageHandle.so_far(follower.name, {number: committed.data})
