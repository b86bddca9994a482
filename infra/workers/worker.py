"""A worker: the models of some roles in one process. Stages compute only in workers.

Calls carry references and config, never rows or weights: the worker reads the stage's inputs from the store, computes,
and writes its outputs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING
from uuid import uuid4

import numpy as np
import pyarrow as pa

from ratchet.infra.store.images import Images
from ratchet.infra.store.judge_answers import JudgeAnswers
from ratchet.infra.store.log import Corrupt, Fenced
from ratchet.infra.store.records import ObjectRef, ShardRef, Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.batching import Together
from ratchet.infra.workers.call_inputs import CallInputs
from ratchet.infra.workers.call_log import JOURNAL, CallLog, NoLog, TurnLog
from ratchet.infra.workers.calls import (
    C,
    Call,
    ComputedShard,
    Context,
    Pending,
    RowsCall,
    S,
    ShardKey,
    ShardOutput,
    UpdateCall,
    Updated,
)
from ratchet.infra.workers.checkpoints import CheckpointWriter, stored_state
from ratchet.infra.workers.held_weights import HeldWeights, WrongPolicyVersion
from ratchet.infra.workers.resources import Resources
from ratchet.infra.workers.role_engines import Engines
from ratchet.infra.workers.rollout_weights import RolloutWeights
from ratchet.infra.workers.rollouts import Generated, Rollouts
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.distributed import accelerator, determinism, ranks
from ratchet.rlhf.errors import EngineLost, NotFinite, RatchetError

if TYPE_CHECKING:
    from ratchet.rlhf.agents.agent_loop import Generator
    from ratchet.rlhf.environments.dialogues import Dialogue
    from ratchet.rlhf.rollout.engine import RolloutEngine, Scored

WAIT_S = 1.0
"""Longest time in seconds for which a worker waits for a complete trajectory."""


class Worker:
    """The worker of one process, which computes shards and updates, generates, and loads, moves and saves weights."""

    def __init__(self, config: RunConfig, store: RunStore, roles: Iterable[str] | None = None) -> None:
        if config.run.deterministic:
            determinism.enforce()
        self.config = config
        self.store = store
        images = Images(store.objects)
        self.engines = Engines(config, config.roles if roles is None else roles, self._new_weights_follow, images.get)
        self.resources = Resources(config, JudgeAnswers(store.objects), images)
        self.term = 0
        self._held = HeldWeights(self.engines)
        self._rollout_weights = RolloutWeights(config, self.engines, self.resources, self._held)
        self._checkpoints = CheckpointWriter(store)
        self._inputs = CallInputs(store, self.resources)
        self._updated: dict[str, Updated] = {}
        self._computing = {role: threading.RLock() for role in (*self.roles, "rollout")}
        """Locks by role, each held while the role computes or loads other weights."""
        self.rollouts = Rollouts(self._generator, self._call_log, self._turn_log)

    @property
    def roles(self) -> frozenset[str]:
        """The roles whose models this worker holds."""
        return self.engines.roles

    def rows(self, requests: Sequence[RowsCall[C, S]]) -> list[ComputedShard[S]]:
        """Computes shards of a stage and writes them, without committing them; see `computed`."""
        outputs, seconds = self.computed(requests)
        is_writer = ranks.rank() == 0  # the other ranks hold the same rows
        return [
            ComputedShard(self._write(request, output) if is_writer else None, output.summary, seconds / len(outputs))
            # fewer outputs if a shard is not finite
            for request, output in zip(requests, outputs, strict=False)
        ]

    def _write(self, request: RowsCall[C, S], output: ShardOutput[S]) -> ShardRef:
        call = request.call
        return self.store.write_shard(call.iteration, call.stage, call.attempt, call.shard, output.batch.table)

    def computed(self, requests: Sequence[RowsCall[C, S]]) -> tuple[list[ShardOutput[S]], float]:
        """Computes shards of a stage that need the same weights, without writing them. The rows of a shard do not
        depend on the other shards of the call.

        Returns:
            Rows and summary of each shard, and the compute time in seconds. If a shard is not finite, it and those
            after it are left out.

        Raises:
            Fenced: a newer driver uses the worker.
            WrongPolicyVersion: the role does not hold the weights of the calls.
            NotFinite: a column of the first shard contains NaN or infinity.
            EngineLost: the engine died; it was discarded.
        """
        first = requests[0]
        assert all(request.call.needs == first.call.needs for request in requests)
        role = first.call.role
        with nullcontext() if role is None else self._computing[self.engines.owner(role)]:
            self._check_weights(first.call)
            started = time.perf_counter()
            if first.begin is None:
                outputs = self._together(requests)
            else:
                self.engines.rollout()  # on all ranks
                team = self.engines.team
                own = dict(self.generated(requests)) if team.leads else {}
                outputs = team.of_leader([own[request.call.shard] for request in requests] if team.leads else None)
            return outputs, time.perf_counter() - started

    def _together(self, requests: Sequence[RowsCall[C, S]]) -> list[ShardOutput[S]]:
        role, batches = requests[0].call.role, [self._inputs.batch(request.call) for request in requests]
        together = None if role is None else Together(partial(self.engines.inference, role), batches)
        outputs: list[ShardOutput[S]] = []
        for request, batch in zip(requests, batches, strict=True):
            context = replace(self._context(request.call, batch), together=together)
            try:
                outputs.append(self._output(request, context))
            except NotFinite:
                # otherwise keep the shards before it, so that what is committed does not depend on the grouping, either
                if not outputs:
                    raise
                break
        return outputs

    def generated(self, requests: Sequence[RowsCall[C, S]]) -> Iterator[tuple[int, ShardOutput[S]]]:
        """Yields number, rows and summary of shards of a stage that generates, all at the same time, in order of
        completion."""
        engine = self.engines.rollout()
        batches = [[request] for request in requests] if engine.in_batches else [requests]
        for batch in batches:
            by_key = {request.key: request for request in batch}
            names = {
                key: [name for prompt in self.begin(request, records=False) for name in prompt]
                for key, request in by_key.items()
            }
            left = {key: set(ids) for key, ids in names.items()}
            try:
                while left:
                    assert batch[0].call.weights is not None
                    self.rollouts.submit(engine, batch[0].call.weights, [(key, names[key]) for key in left])
                    for key, name in self.rollouts.wait(WAIT_S):
                        left[key].discard(name)
                        if not left[key]:
                            del left[key]
                            yield key[2], self._output(by_key[key], self.rollouts.finish(key, ()))
            finally:
                self.rollouts.drop(list(by_key))

    def begin(self, request: RowsCall[C, S], *, records: bool = True) -> tuple[tuple[str, ...], ...]:
        """Opens a shard of a stage that generates. Returns the ids of its trajectories, grouped by prompt.

        Args:
            records: store the answers that agents get, and durable environments' turns, so that a crash does not
                lose them.
        """
        self.accept_term(request.call.term)
        call = request.call
        context = self._context(call, self._inputs.batch(call))
        return self.rollouts.begin(request, context, self._inputs.journaled(call), records=records)

    def _call_log(self, stage: str, iteration: int, records: bool) -> CallLog | NoLog:
        scope = f"{self._run_uuid}/{stage}"
        if not records:
            return NoLog(scope)
        return CallLog(partial(self.store.write_calls, iteration, stage, self.term), scope)

    def _turn_log(self, stage: str, iteration: int, records: bool) -> TurnLog | NoLog:
        scope, term = f"{self._run_uuid}/{stage}", self.term
        if not records:
            return NoLog(scope)

        def write(table: pa.Table) -> None:
            self.store.write_calls(iteration, stage, term, table)
            # a driver that claims the run after this look finds the turn, and one that claimed it before ends this one:
            # two never let an environment answer the same turn
            newest = self.store.log.read().term
            if newest > term:
                raise Fenced(f"another driver (term {newest}) has taken the run over from this one (term {term})")

        return TurnLog(write, scope)

    @cached_property
    def _run_uuid(self) -> str:
        """Names the run as no other; outside of a run, such as in an evaluation, this worker."""
        try:
            return self.store.log.record(0).uuid
        except Corrupt:
            if self.store.objects.list("log/"):
                raise
            return uuid4().hex

    def journal(self, iteration: int, stage: str, number: int) -> ShardRef | None:
        """Writes the trajectories that a stage's open shards have so far; returns None without any.

        Args:
            number: distinguishes the journals of this driver.
        """
        rows = self.rollouts.journal(iteration, stage)
        if not rows:
            return None
        return self.store.write_journal(iteration, stage, number, pa.Table.from_pylist(rows, JOURNAL))

    def generate(
        self, weights: Weights, submitted: Sequence[tuple[ShardKey, Sequence[str]]], wait_s: float
    ) -> list[Generated]:
        """Starts trajectories of open shards, and waits until any trajectory is complete.

        Args:
            weights: weights of the rollout.
            submitted: trajectory ids by shard; those already running or complete are left alone.
            wait_s: time limit in seconds.

        Returns:
            The trajectories completed since the last call.

        Raises:
            WrongPolicyVersion: the rollout does not hold these weights.
            NotFinite: a log-prob is not finite.
            EngineLost: the engine died and was discarded. Trajectories keep their tokens, and continue when they are
                submitted again.
        """
        self._held.check("rollout", weights)
        try:
            self.rollouts.submit(self.engines.rollout(), weights, submitted)
            return self.rollouts.wait(wait_s)
        except EngineLost:  # its replacement starts without the weights
            self._rollout_weights.end()
            raise

    def lend_devices(self, weights: Weights) -> None:
        """Gives the devices of a rollout team to its engine; collective. Afterwards the team's first rank generates
        alone.

        Does nothing unless the rollout holds these weights on all ranks; `generate` then refuses the call.
        """
        if self.engines.team.agrees(self.has_weights("rollout", weights)):
            self.engines.rollout()

    def take(self, key: ShardKey, names: Sequence[str]) -> list[Dialogue]:
        """Closes a complete shard, and returns the trajectories that were completed here, for the worker that writes
        the shard."""
        return self.rollouts.take(key, names)

    def finish(self, request: RowsCall[C, S], others: Sequence[Pending[list[Dialogue]]] = ()) -> ComputedShard[S]:
        """Computes and writes a complete shard, without committing it. `others` are the trajectories of other
        workers."""
        started = time.perf_counter()
        elsewhere = [dialogue for pending in others for dialogue in pending.result()]
        output = self._output(request, self.rollouts.finish(request.key, elsewhere))
        return ComputedShard(self._write(request, output), output.summary, time.perf_counter() - started)

    def pause(self) -> None:
        """Ends the rollout's requests, so that its weights can change. With `rollout.partial` they are interrupted;
        otherwise running trajectories are completed first. `generate` resumes."""
        self.rollouts.pause()

    def drop(self, keys: Sequence[ShardKey]) -> None:
        """Forgets open shards, and cancels their incomplete trajectories."""
        self.rollouts.drop(keys)

    def _output(self, request: RowsCall[C, S], context: Context[C]) -> ShardOutput[S]:
        output = request.compute(context)
        expected = ["trajectory_id", *(column.name for column in request.writes)]
        wrote = output.batch.columns
        assert wrote == expected, f"{request.call.stage} wrote {wrote}, and declares that it writes {expected}"
        batch = output.batch.cast({column.name: column.type for column in request.writes})
        _check_finite(batch, request.call.stage)
        return ShardOutput(batch, output.summary)

    def _check_weights(self, call: Call[C]) -> None:
        self.accept_term(call.term)
        role, weights = call.role, call.weights
        if role is None or weights is None or self._held.has(role, weights):
            return
        has_copy = role == "rollout" and not self.rollout_is_actor()
        if not has_copy or self.copy_to_rollout(weights) is None:
            raise WrongPolicyVersion(role)
        self._held.hold(role, weights)

    def _generator(self, engine: RolloutEngine) -> Generator:
        from ratchet.rlhf.agents.agent_loop import Generator

        assert engine.in_batches == self.config.rollout.engine.in_batches
        return Generator(engine, self.resources.tokenizer, interruptible=self.config.rollout.partial)

    def update(self, request: UpdateCall[C]) -> Updated:
        """Updates a role from the call's weights to the next version. Repeating the call returns the finished result.

        Raises `Fenced` and `WrongPolicyVersion` as `computed`.
        """
        role = request.call.role
        assert role in self.roles
        with self._computing[role]:
            return self._update(request)

    def _update(self, request: UpdateCall[C]) -> Updated:
        call = request.call
        self.accept_term(call.term)
        assert call.role is not None and call.weights is not None
        # a driver that lost the answer asks again, when the role already holds the new weights
        done = self._updated.get(call.role)
        if done is not None and self._held.has(call.role, done.weights) and done.before == call.weights:
            return done
        for role, weights in call.needs.items():
            self._held.check(role, weights)
        batch = self._inputs.batch(call)
        started = time.perf_counter()
        with self.engines.lock:  # from now on nobody copies the tensors, which are about to change
            self._held.lose(call.role)
        metrics = request.compute(self._context(call, batch))
        digest = self.engines.state_of(call.role).digest()
        weights = Weights(version=call.weights.version + 1, digest=digest)
        self._held.hold(call.role, weights)
        seconds = time.perf_counter() - started
        self._updated[call.role] = Updated(call.weights, weights, metrics, seconds, accelerator.device().type)
        return self._updated[call.role]

    def _context(self, call: Call[C], batch: TrajectoryBatch) -> Context[C]:
        return Context(call, batch, self.engines, self.resources, self._inputs.replayed(call))

    def has_weights(self, role: str, weights: Weights | None) -> bool:
        """True if the role holds these weights."""
        return self._held.has(role, weights)

    def _new_weights_follow(self) -> bool:
        """True if a rollout that makes room now gets weights from this process's actor before it generates again."""
        config = self.config
        is_fed_here = "actor" in self.roles and config.train.updates and config.model.lora is None
        # No open shard means that the iteration's last shard is done, and its update follows. If nothing was updated,
        # the rollout gets the same weights again, which costs no more than keeping them.
        return is_fed_here and config.rollout.mode == "sync" and self.rollouts.is_empty

    def rollout_is_actor(self) -> bool:
        """True if the rollout shares the actor's tensors."""
        return self.engines.owner("rollout") == "actor"

    def log_probs_of(self, weights: Weights, texts: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Computes the actor's log-probs of each text's tokens but the first, at temperature 1; None: the actor has
        other weights."""
        with self._computing["actor"]:
            if not self._held.has("actor", weights):
                return None
            batch = TrajectoryBatch.of(
                {"prompt_ids": [text[:1] for text in texts], "response_ids": [text[1:] for text in texts]}
            )
            tokens = sum(map(len, texts))
            outputs = self.engines.model("actor").infer(
                batch, ("log_probs",), temperature=1.0, micro_batch_tokens=tokens
            )
            log_probs: list[list[float]] = outputs["log_probs"].to_pylist()
            return log_probs

    def score(self, texts: Sequence[Sequence[int]], drawn: int) -> dict[str, list[Scored]]:
        """Lets every engine of the rollout score texts; see `RolloutEngine.score`. Returns their answers by name."""
        engine = self.engines.rollout()  # on all ranks
        # all ranks have the same servers
        asks = ranks.rank() == 0 if self.config.rollout.engine.outlives_runs else self.engines.team.leads
        own: dict[str, list[Scored]] = {}
        problem: RatchetError | None = None
        try:
            own = engine.score(texts, drawn) if asks else {}
        except RatchetError as error:
            problem = error
            if isinstance(error, EngineLost):  # its replacement starts without the weights
                self._rollout_weights.end()
        everyone = ranks.gathered((own, problem))
        for _, met in everyone:
            if met is not None:  # on every rank, so that none waits for the others
                raise met
        several = sum(bool(answers) for answers, _ in everyone) > 1
        return {
            name or ("the rollout" if not several else f"the rollout of rank {rank}"): scored
            for rank, (answers, _) in enumerate(everyone)
            for name, scored in answers.items()
        }

    def copy_to_rollout(self, weights: Weights) -> int | None:
        """Copies the actor's weights to the rollout of this process. Returns the bytes moved; None: the actor has other
        weights. The rollout generates with them after `mark_as_version`."""
        return self._rollout_weights.copy(weights)

    def open_rendezvous(self) -> str:
        """Opens the rendezvous to which rollouts of other processes connect, and returns its URL; see `connect`."""
        return self._rollout_weights.open_rendezvous()

    def connect(self, url: str, count: int, *, sends: bool) -> bool:
        """Connects the trainer and all processes of the rollout for transfers of weights; all must call it.

        Args:
            url: from `open_rendezvous` on rank 0.
            count: number of members: rank 0 of the trainer, and all ranks of the rollout.
            sends: True for the trainer.

        Returns:
            False if a member cannot be reached.
        """
        return self._rollout_weights.connect(url, count, sends=sends)

    def is_connected(self, url: str) -> bool:
        """True if `connect` was called for this rendezvous, and no transfer has failed since."""
        return self._rollout_weights.is_connected(url)

    def send_weights(self, weights: Weights) -> int | None:
        """Sends the actor's weights over the link, while the rollout's processes call `receive_weights`.

        Returns the bytes sent; None: the transfer failed, or the actor holds other weights by now.
        """
        return self._rollout_weights.send(weights)

    def receive_weights(self, weights: Weights) -> bool:
        """Receives the rollout's weights over the link; False if the transfer failed."""
        return self._rollout_weights.receive(weights)

    def load(self, role: str, weights: Weights, checkpoint: ObjectRef | None) -> None:
        """Loads a role's checkpoint, or its initial weights if `checkpoint` is None, and labels the tensors with
        `weights`."""
        stored = None if checkpoint is None else stored_state(self.store, self.store.checkpoint(checkpoint))
        if role == "rollout":
            self._rollout_weights.load(weights, stored)
            return
        with self._computing[role]:
            self._held.lose(role)
            if stored is not None:
                self.engines.model(role, learns=True).load_state(stored)
            elif self.engines.owner(role) == role:  # otherwise it has no tensors of its own to reset
                self.engines.forget(role)
                self.engines.inference(role)
            self._held.hold(role, weights)

    def close(self) -> None:
        """Ends the rollout engine and the reward processes, and drops all models."""
        self._checkpoints.close()
        self.rollouts.close()
        self.engines.close()
        self.resources.close()

    def mark_as_version(self, role: str, weights: Weights) -> None:
        """Labels the role's tensors with `weights`: after a transfer to the rollout, or an update that was skipped or
        replayed with different bits."""
        self._held.hold(role, weights)

    def begin_save(self, role: str) -> None:
        """Copies a role's full state, and writes this rank's share in the background."""
        weights = self._held.of(role)
        assert weights is not None, "a role in the middle of an update has no state to save"
        self._checkpoints.begin(role, weights, self.engines.state_of(role).state())

    def begin_publish(self) -> None:
        """Copies the actor's weights for rollout workers, and writes this rank's share in the background;
        `finish_save` of the role rollout completes the checkpoint."""
        weights = self._held.of("actor")
        assert weights is not None, "the driver has restored them"
        self._checkpoints.begin("rollout", weights, self.engines.state_of("actor").state(optimizer=False))

    def is_saved(self, role: str) -> bool:
        """True if this rank has written its share."""
        return self._checkpoints.is_done(role)

    def finish_save(self, role: str) -> ObjectRef | None:
        """Waits until all ranks have written their shares, and writes the checkpoint's manifest.

        Returns the manifest on rank 0. None on other ranks, or if a process died since `begin_save`.
        """
        return self._checkpoints.finish(role)

    def accept_term(self, term: int) -> None:
        """Serves this term from now on. Raises `Fenced` if the worker serves a newer term."""
        if term < self.term:
            raise Fenced(f"a worker refused a call of term {term}: it serves term {self.term}")
        if term > self.term:
            self.rollouts.drop_all()  # the new driver submits what it needs
        self.term = term


def _check_finite(batch: TrajectoryBatch, stage: str) -> None:
    for name in batch.columns:
        kind = batch.table.schema.field(name).type
        is_list = pa.types.is_list(kind)
        if pa.types.is_floating(kind.value_type if is_list else kind):
            values = batch.flat(name) if is_list else batch.array(name).fill_null(0).to_numpy()
            bad = np.flatnonzero(~np.isfinite(values))
            if len(bad):
                starts = np.cumsum(batch.lengths(name)) if is_list else np.arange(1, len(batch) + 1)
                row = int(np.searchsorted(starts, bad[0], side="right"))
                where = batch.list("trajectory_id")[row]
                raise NotFinite(f"{stage} computed {values[bad[0]]} in column {name} of {where}; nothing is committed")
