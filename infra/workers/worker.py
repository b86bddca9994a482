"""A worker: the models of some roles in one process. Stages compute only in workers.

Calls carry references and config, never rows or weights: the worker reads the stage's inputs from the store, computes,
and writes its outputs.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ratchet.infra.progress import note
from ratchet.infra.store.answers import Answers
from ratchet.infra.store.log import Corrupt, Fenced
from ratchet.infra.store.manifest import Checkpoint, File
from ratchet.infra.store.records import ObjectRef, ShardRef, Weights
from ratchet.infra.store.run_store import RunStore, is_call_file
from ratchet.infra.workers.batching import Together
from ratchet.infra.workers.call_log import CallLog, recorded_of
from ratchet.infra.workers.calls import (
    Answer,
    C,
    Call,
    Context,
    Experience,
    ExpertExperience,
    Pending,
    Rows,
    RowsCall,
    S,
    ShardKey,
    ShardOutput,
    UpdateCall,
    Updated,
)
from ratchet.infra.workers.checkpoints import stored_state
from ratchet.infra.workers.engines import Engines
from ratchet.infra.workers.resources import Resources
from ratchet.infra.workers.rollouts import Generated, Journaled, Rollouts, newest, of_this_release
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.data.prompts import encode
from ratchet.rlhf.distributed import determinism, ranks
from ratchet.rlhf.distributed.host_buffers import release_memory
from ratchet.rlhf.errors import EngineLost, NotFinite
from ratchet.rlhf.models import load_actor
from ratchet.rlhf.rollout.engine import Sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ratchet.rlhf.agents.agent_loop import Generator
    from ratchet.rlhf.distributed.rendezvous import Meeting
    from ratchet.rlhf.environments.dialogues import Dialogue
    from ratchet.rlhf.rollout.engine import RolloutEngine
    from ratchet.rlhf.train.engine import InferenceEngine
    from ratchet.rlhf.weights.broadcast import WeightLink

T = TypeVar("T")
JOURNAL = pa.schema(
    {
        "trajectory_id": pa.string(),
        "ids": pa.list_(pa.int32()),
        "log_probs": pa.list_(pa.float32()),
        "mask": pa.list_(pa.int8()),
        "versions": pa.list_(pa.int32()),
        "turn_starts": pa.list_(pa.int32()),
        "turn_ends": pa.list_(pa.int32()),
        "turn_rewards": pa.list_(pa.float64()),
        "finish_reason": pa.string(),
        "tool_error": pa.string(),
    }
)
"""Columns of a journal; see `Dialogue`."""
WAIT_S = 1.0
"""Seconds for which a worker waits for a complete trajectory at most."""
LINK_S = 1800.0
"""Seconds without progress after which a transfer of weights to or from the driver's process fails."""
WEIGHTS_OF = {"rollout": "actor"}
"""The rollout generates with the actor's weights: either the same tensors or its own copy."""


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written."""

    folder: str
    weights: Weights
    written: Future[dict[str, File]]


class WrongPolicyVersion(Exception):
    """The worker does not hold the weights of a call. The caller should load the newest snapshot and replay."""


class Worker:
    """Computes shards and updates, and knows which version of the weights each role holds."""

    def __init__(self, config: RunConfig, store: RunStore, roles: Iterable[str] | None = None) -> None:
        if config.run.deterministic:
            determinism.enforce()
        self.config = config
        self.store = store
        self.engines = Engines(config, config.roles if roles is None else roles, self._new_weights_follow)
        self.resources = Resources(config, Answers(store.objects))
        self.term = 0
        self._weights: dict[str, Weights | None] = {}
        """The weights that each role holds; None during an update, when its tensors have no version."""
        self._updated: dict[str, Updated] = {}
        self._rollout_has: Weights | None = None
        """The weights of the rollout's own copy of the actor, if it has one."""
        self._server_checked = False
        self._saving: dict[str, Saving] = {}
        self._computing = {role: threading.RLock() for role in (*self.roles, "rollout")}
        """Each is held while a role computes, or while it loads other weights."""
        self._meeting: Meeting | None = None
        self._link: tuple[str, WeightLink] | None = None
        """The connection for new weights between this process and others, and the URL of their meeting."""
        self.rollouts = Rollouts(self._generator, self._call_log)
        self._last_journal: tuple[tuple[ShardRef, ...], Journaled] = ((), Journaled())

    @property
    def roles(self) -> frozenset[str]:
        """The roles whose models this worker holds."""
        return self.engines.roles

    def rows(self, requests: Sequence[RowsCall[C, S]]) -> list[Rows[S]]:
        """Compute shards of a stage and write them, without committing them; see `computed`."""
        outputs, seconds = self.computed(requests)
        return [
            self._written(request, output, seconds / len(outputs))
            for request, output in zip(requests, outputs, strict=False)
        ]

    def computed(self, requests: Sequence[RowsCall[C, S]]) -> tuple[list[ShardOutput[S]], float]:
        """Compute shards of a stage without writing them. Their rows do not depend on which shards are computed
        together.

        Args:
            requests: the calls, which need the same weights.

        Returns:
            Rows and summary of each shard, and the compute time in seconds. If a shard is not finite, it and those
            after it are left out, so that what is committed does not depend on it, either.

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
        role, batches = requests[0].call.role, [self._read(request.call) for request in requests]
        together = None if role is None else Together(partial(self.engines.inference, role), batches)
        outputs: list[ShardOutput[S]] = []
        for request, batch in zip(requests, batches, strict=True):
            context = replace(self._context(request.call, batch), together=together)
            try:
                outputs.append(self._output(request, context))
            except NotFinite:
                if not outputs:
                    raise
                break
        return outputs

    def generated(self, requests: Sequence[RowsCall[C, S]]) -> Iterator[tuple[int, ShardOutput[S]]]:
        """Compute shards of a stage that generates, all at the same time, with the weights that the rollout has.

        Args:
            requests: the calls.

        Yields:
            Number, rows and summary of each shard, in the order in which they become complete.

        Raises:
            EngineLost: the engine died.
        """
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
        """Open a shard of a stage that generates.

        Args:
            request: the call.
            records: whether the answers that agents get are stored, so that a crash does not lose them.

        Returns:
            The ids of its trajectories, those of a prompt together.

        Raises:
            Fenced: a newer driver uses the worker.
        """
        self.accept_term(request.call.term)
        call = request.call
        context = self._context(call, self._read(call))
        return self.rollouts.begin(request, context, self._journaled(call), records=records)

    def _call_log(self, stage: str, iteration: int) -> CallLog:
        return CallLog(partial(self.store.write_calls, iteration, stage, self.term))

    def journal(self, iteration: int, stage: str, number: int) -> ShardRef | None:
        """Write what a stage's open shards have generated so far; None if there is nothing.

        Args:
            iteration: the stage's iteration.
            stage: the stage's name.
            number: distinguishes the journals of this driver.
        """
        rows = self.rollouts.journal(iteration, stage)
        if not rows:
            return None
        return self.store.write_journal(iteration, stage, number, pa.Table.from_pylist(rows, JOURNAL))

    def _journaled(self, call: Call[C]) -> Journaled:
        """What the call's journal has. A damaged journal is left out: it saves time, no more."""
        parts, journaled = self._last_journal
        if parts != call.journal:
            written: list[Mapping[str, Any]] = []
            answers: list[Mapping[str, Any]] = []
            for part in call.journal:
                try:
                    rows = self.store.read_shard(part).to_pylist()
                except Corrupt as damage:
                    note(f"generation restarts without a journal: {damage}")
                else:
                    (answers if is_call_file(part.key) else written).extend(rows)
            journaled = Journaled(newest(of_this_release(written)), recorded_of(answers))
            self._last_journal = call.journal, journaled
        return journaled

    def generate(
        self, weights: Weights, submitted: Sequence[tuple[ShardKey, Sequence[str]]], wait_s: float
    ) -> list[Generated]:
        """Start trajectories of open shards, and wait until any trajectory is complete.

        Args:
            weights: weights of the rollout.
            submitted: trajectory ids by shard; those that run already, or are complete, are left alone.
            wait_s: time limit in seconds.

        Returns:
            The trajectories that are complete since the last call.

        Raises:
            WrongPolicyVersion: the rollout does not hold these weights.
            NotFinite: a log-prob is not finite.
            EngineLost: the engine died and was discarded. Trajectories keep their tokens, and continue when they are
                submitted again.
        """
        if not self.has_weights("rollout", weights):
            raise WrongPolicyVersion("rollout")
        try:
            self.rollouts.submit(self.engines.rollout(), weights, submitted)
            return self.rollouts.wait(wait_s)
        except EngineLost:  # its replacement starts without the weights
            self._end_rollout()
            raise

    def lend_devices(self, weights: Weights) -> None:
        """Give the devices of a rollout team to its engine; collective. Then the team's first rank generates alone.

        Args:
            weights: nothing happens unless the rollout has these weights on all ranks: `generate` will refuse.
        """
        if self.engines.team.agrees(self.has_weights("rollout", weights)):
            self.engines.rollout()

    def take(self, key: ShardKey, names: Sequence[str]) -> list[Dialogue]:
        """The complete trajectories of a shard with these ids, for the worker that writes the shard."""
        return self.rollouts.take(key, names)

    def finish(self, request: RowsCall[C, S], others: Sequence[Pending[list[Dialogue]]] = ()) -> Rows[S]:
        """Compute and write a shard whose trajectories are complete.

        Args:
            request: the call.
            others: the trajectories that other workers have generated.

        Returns:
            The shard, which is written and not committed.
        """
        started, call = time.perf_counter(), request.call
        elsewhere = [dialogue for pending in others for dialogue in pending.result()]
        output = self._output(request, self.rollouts.finish(request.key, elsewhere))
        shard = self.store.write_shard(call.iteration, call.stage, call.attempt, call.shard, output.batch.table)
        return Rows(shard, output.summary, time.perf_counter() - started)

    def pause(self) -> None:
        """Let the rollout's requests end, so that its weights can change. With `rollout.partial` they are interrupted;
        otherwise the trajectories that are running are completed. `generate` continues."""
        self.rollouts.pause()

    def drop(self, keys: Sequence[ShardKey]) -> None:
        """Forget open shards, and cancel what is not complete of them."""
        self.rollouts.drop(keys)

    def _output(self, request: RowsCall[C, S], context: Context[C]) -> ShardOutput[S]:
        output = request.compute(context)
        expected = ["trajectory_id", *(column.name for column in request.writes)]
        wrote = output.batch.columns
        assert wrote == expected, f"{request.call.stage} wrote {wrote}, and declares that it writes {expected}"
        batch = output.batch.cast({column.name: column.type for column in request.writes})
        _check_finite(batch, request.call.stage)
        return ShardOutput(batch, output.summary)

    def _written(self, request: RowsCall[C, S], output: ShardOutput[S], seconds: float) -> Rows[S]:
        shard, call = None, request.call
        if ranks.rank() == 0:  # the other ranks hold the same rows
            shard = self.store.write_shard(call.iteration, call.stage, call.attempt, call.shard, output.batch.table)
        return Rows(shard, output.summary, seconds)

    def _check_weights(self, call: Call[C]) -> None:
        self.accept_term(call.term)
        if call.role is not None and call.weights is not None and not self._ensure_copy(call.role, call.weights):
            raise WrongPolicyVersion(call.role)

    def _generator(self, engine: RolloutEngine) -> Generator:
        from ratchet.rlhf.agents.agent_loop import Generator

        assert engine.in_batches == self.config.rollout.engine.in_batches
        return Generator(engine, self.resources.tokenizer, interruptible=self.config.rollout.partial)

    def update(self, request: UpdateCall[C]) -> Updated:
        """Update a role from the call's weights to the next version. Repeating the call returns the finished result.

        Raises:
            Fenced: a newer driver uses the worker.
            WrongPolicyVersion: the role does not hold the weights of the call.
        """
        role = request.call.role
        assert role in self.roles
        with self._computing[role]:
            return self._update(request)

    def _update(self, request: UpdateCall[C]) -> Updated:
        call = request.call
        self.accept_term(call.term)
        assert call.role is not None and call.weights is not None
        done = self._updated.get(call.role)
        if done is not None and self._weights[call.role] == done.weights and done.before == call.weights:
            return done
        for role, weights in call.needs.items():
            if self._weights.get(role) != weights:
                raise WrongPolicyVersion(role)
        batch = self._read(call)
        started = time.perf_counter()
        with self.engines.lock:  # from now on nobody copies the tensors, which are about to change
            self._weights[call.role] = None
        metrics = request.compute(self._context(call, batch))
        digest = self.engines.state_of(call.role).digest()
        weights = Weights(version=call.weights.version + 1, digest=digest)
        self._weights[call.role] = weights
        seconds = time.perf_counter() - started
        self._updated[call.role] = Updated(call.weights, weights, metrics, seconds, ranks.device().type)
        return self._updated[call.role]

    def _context(self, call: Call[C], batch: TrajectoryBatch) -> Context[C]:
        replayed = {number: self._answers(call, experience) for number, experience in call.replayed.items()}
        return Context(call, batch, self.engines, self.resources, replayed)

    def _answers(self, call: Call[C], experience: Experience | ExpertExperience) -> list[Answer]:
        """The answers that a prompt is drawn with."""
        if isinstance(experience, ExpertExperience):
            return [self._expert_answer(call, experience, number) for number in experience.answers]
        table = self.store.read_shard(experience.shard)
        rows = table.filter(pc.field("prompt_id") == experience.prompt_id).to_pylist()
        return [
            Answer(
                ids=row["response_ids"],
                log_probs=row["rollout_log_probs"],
                mask=row["response_mask"],
                versions=row["token_versions"] or [row["policy_version"]] * len(row["response_ids"]),
                finish_reason=row["finish_reason"],
                source=f"{experience.source} {row['trajectory_id']}",
            )
            for row in sorted(rows, key=lambda row: int(row["sample"]))
        ]

    def _expert_answer(self, call: Call[C], experience: ExpertExperience, number: int) -> Answer:
        """An answer of an expert, whose probability of each token is unknown and taken as 1."""
        where, ids = self.resources.experts(experience.files).answer(number, self.resources.tokenizer)
        assert call.weights is not None, "the rollout has weights"
        size = len(ids)
        return Answer(ids, [0.0] * size, [1] * size, [call.weights.version] * size, "stop", where, by_expert=True)

    def has_weights(self, role: str, weights: Weights | None) -> bool:
        """Whether the role holds these weights."""
        has_copy = role == "rollout" and not self.rollout_is_actor()
        if has_copy and self.engines.rollout_is_empty:
            return False
        return weights is not None and weights == (
            self._rollout_has if has_copy else self._weights.get(_owner_of(role))
        )

    def _new_weights_follow(self) -> bool:
        """Whether the rollout, which makes room now, gets weights from this process's actor before it generates again.

        So it is after the last shard of an iteration, whose update follows. If nothing was updated, the rollout gets
        the same weights again, which is not worse than to have kept them.
        """
        config = self.config
        is_fed_here = "actor" in self.roles and config.train.updates and config.model.lora is None
        return is_fed_here and config.rollout.mode == "sync" and self.rollouts.is_empty

    def rollout_is_actor(self) -> bool:
        """Whether the rollout shares the actor's tensors."""
        return self.engines.owner("rollout") == "actor"

    def copy_to_rollout(self, weights: Weights) -> int | None:
        """Copy the actor's weights to the rollout of this process.

        Returns:
            Bytes that were moved; None: this worker's actor does not hold these weights.
        """
        with self.engines.lock:
            if "actor" not in self.roles or self._weights.get("actor") != weights:
                return None
            actor = self.engines.state_of("actor")
            rollout = self.engines.rollout(generates=False)
            self._rollout_has = None
            with _to_the_end(actor.weights(self._rollout_dtype)) as tensors:
                moved = rollout.load_weights(tensors, actor.adapter_config)
            self.engines.rollout_is_empty = False
            if self.config.rollout.engine.outlives_runs:
                self._check_server(rollout, self.engines.model("actor"))
            if self.config.actor.offload_when_idle:  # gathering has taken memory, which the engine needs to wake
                release_memory(ranks.device())
            self._rollout_has = weights
            return moved

    @property
    def _rollout_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.config.model.dtype)
        return dtype

    def open_meeting(self) -> str:
        """Let rollouts of other processes connect to this worker; returns the URL. See `connect`."""
        from ratchet.rlhf.distributed.rendezvous import Meeting

        self._meeting = Meeting(_own_address(), self._timeout_s("actor"))
        return self._meeting.url

    def connect(self, url: str, count: int, *, sends: bool) -> bool:
        """Connect the trainer, and all processes of the rollout, for transfers of weights; all must call it.

        Args:
            url: of rank 0's meeting.
            count: number of members: rank 0 of the trainer, and all ranks of the rollout.
            sends: whether this worker is the trainer.

        Returns:
            False if a member cannot be reached.
        """
        from ratchet.rlhf.weights.broadcast import SENDER, LinkLost, WeightLink

        if sends and ranks.rank() > 0:
            return True
        meeting = self._meeting if sends else url
        assert meeting is not None, "the trainer has opened it"
        member = SENDER if sends else SENDER + 1 + ranks.rank()
        self._link = None
        try:
            link = WeightLink(meeting, member, count, _own_address(), self._timeout_s("actor" if sends else "rollout"))
        except LinkLost as error:
            note(str(error))
            return False
        self._link = (url, link)
        return True

    def is_connected(self, url: str) -> bool:
        """Whether `connect` was called for this meeting, and no transfer has failed since."""
        is_gathering = "actor" in self.roles and ranks.rank() > 0  # rank 0 sends
        return is_gathering or (self._link is not None and self._link[0] == url)

    def send_weights(self, weights: Weights) -> int | None:
        """Send the actor's weights over the link, while the rollout's processes call `receive_weights`.

        Returns:
            Bytes that were sent; None: the transfer failed, or the actor has other weights by now.
        """
        from ratchet.rlhf.weights.broadcast import LinkLost

        link = None if self._link is None else self._link[1]
        try:
            with self.engines.lock:
                if self._weights.get("actor") != weights:  # on all ranks
                    if link is not None:
                        link.refuse()
                    return None
                actor = self.engines.state_of("actor")
                with _to_the_end(actor.weights(self._rollout_dtype)) as tensors:
                    if ranks.rank() > 0:  # takes part in gathering them
                        return 0
                    assert link is not None, "the caller has connected the workers"
                    return link.send(tensors, self._rollout_dtype, actor.adapter_config)
        except LinkLost as error:
            note(str(error))
            self._link = None
            return None

    def receive_weights(self, weights: Weights) -> bool:
        """Receive the rollout's weights over the link; False if the transfer failed."""
        from ratchet.rlhf.weights.broadcast import LinkLost

        assert self._link is not None, "the caller has connected the workers"
        is_changed = False
        try:
            adapter_config, received = self._link[1].receive()
            is_changed, self._rollout_has = True, None
            with _to_the_end(received) as tensors:  # otherwise the sender waits for this process
                self._load_rollout(tensors, adapter_config)
        except LinkLost as error:
            note(str(error))
            self._link = None
            if is_changed:
                self._end_rollout()  # some of its tensors are new, and some are old
            return False
        self.engines.rollout_is_empty = False
        self._rollout_has = weights
        return True

    def _timeout_s(self, role: str) -> float:
        pool = self.config.pool_of(role)
        return LINK_S if pool is None else self.config.pools[pool].timeout_s

    def _check_server(self, rollout: RolloutEngine, actor: InferenceEngine) -> None:
        """Compare a server's log-probs with those of the actor, whose weights it has just loaded. Runs once."""
        if self._server_checked:
            return
        from ratchet.rlhf.rollout.server_engine import ServerRollout, check_log_probs

        assert isinstance(rollout, ServerRollout)
        data, rollout_config = self.config.data, self.config.rollout
        dataset = self.resources.dataset(data.train)
        [row] = dataset.draw(self.config.run.seed, 0, 1)
        _, ids = encode(
            dataset[row],
            self.resources.tokenizer,
            max_tokens=data.max_prompt_tokens,
            truncation=data.truncation,
            system_prompt=data.system_prompt,
        )
        sampling = Sampling.of(
            rollout_config,
            temperature=rollout_config.temperature,
            seed=self.config.run.seed,
            seeds=rollout_config.seeds,
        )
        check_log_probs(rollout, actor, ids, sampling)
        self._server_checked = True

    def _ensure_copy(self, role: str, weights: Weights) -> bool:
        if self.has_weights(role, weights):
            return True
        has_copy = role == "rollout" and not self.rollout_is_actor()
        return has_copy and self.copy_to_rollout(weights) is not None

    def load(self, role: str, weights: Weights, checkpoint: ObjectRef | None) -> None:
        """Load a role's checkpoint, or its initial weights if `checkpoint` is None.

        Args:
            role: a role of this worker.
            weights: the version that the role holds afterwards.
            checkpoint: the manifest of the checkpoint.
        """
        stored = None if checkpoint is None else stored_state(self.store, self.store.checkpoint(checkpoint))
        if role == "rollout":
            self._rollout_has = None
            if stored is not None:
                self._load_rollout(stored.tensors(), stored.file("adapter_config.json"))
            elif self.config.rollout.engine.outlives_runs:  # the server may hold other weights
                from ratchet.rlhf.models.hub_layout import hub_weights

                self._load_rollout(hub_weights(load_actor(self.config.model, self.config.run.seed)), None)
            else:
                self._end_rollout()
            self._rollout_has = weights
            return
        with self._computing[role]:
            self._weights[role] = None
            if stored is not None:
                self.engines.model(role, learns=True).load_state(stored)
            elif role != "reference" or not self._reference_is_actor():
                self.engines.forget(role)
                self.engines.model(role)
            self._weights[role] = weights

    def _reference_is_actor(self) -> bool:
        return self.engines.owner("reference") == "actor"

    def _load_rollout(self, tensors: Iterable[tuple[str, Tensor]], adapter_config: bytes | None) -> None:
        """Load weights into a rollout in a different process from the actor."""
        rollout = self.engines.rollout(generates=False)
        self.engines.rollout_is_empty = False
        if not self.config.rollout.engine.outlives_runs or self._server_checked:
            rollout.load_weights(tensors, adapter_config)
            return
        from ratchet.rlhf.models.hub_layout import hub_weights
        from ratchet.rlhf.train.model_engine import copy_weights
        from ratchet.rlhf.train.torch_engine import TorchEngine

        # there is no actor here to compare the server's log-probs with, so load one
        model = load_actor(self.config.model, self.config.run.seed)
        copy_weights(tensors, model)
        rollout.load_weights(hub_weights(model))
        actor = TorchEngine(model, "policy", dtype=self.config.model.dtype, trainable=False)
        self._check_server(rollout, actor)

    def _end_rollout(self) -> None:
        with self.engines.lock:
            self._rollout_has = None
            self.engines.end_rollout()

    def close(self) -> None:
        """End the rollout engine and the reward processes."""
        if self._saving and self.store.log.is_deleted():  # the driver then deletes what was written
            wait([saving.written for saving in self._saving.values()])
        self.rollouts.drop_all()
        self._end_rollout()
        self.resources.close()

    def mark_as_version(self, role: str, weights: Weights) -> None:
        """Label the role's tensors with `weights`, after an update was skipped or replayed with different bits."""
        self._weights[role] = weights

    def begin_save(self, role: str) -> None:
        """Copy a role's full state, and write this rank's share in the background."""
        weights = self._weights[role]
        assert weights is not None, "a role in the middle of an update has no state to save"
        folder, files = self.store.checkpoint_folder(role, weights), self.engines.state_of(role).state()
        written = in_background(lambda: self.store.write_checkpoint_files(folder, files))
        self._saving[role] = Saving(folder, weights, written)

    def is_saved(self, role: str) -> bool:
        """Whether this rank has written its share."""
        return role not in self._saving or self._saving[role].written.done()

    def finish_save(self, role: str) -> ObjectRef | None:
        """Wait until all ranks have written their shares, and write the checkpoint's manifest.

        Returns:
            The manifest, on rank 0. None on other ranks, or if a process died since `begin_save`.
        """
        saving = self._saving.pop(role, None)
        own_share = None if saving is None else saving.written.result()
        shares = ranks.gathered(own_share)
        if saving is None or None in shares:
            return None
        files = {name: file for share in shares for name, file in share.items()}
        checkpoint = Checkpoint(role=role, weights=saving.weights, files=files)
        return self.store.write_checkpoint_manifest(saving.folder, checkpoint) if ranks.rank() == 0 else None

    def accept_term(self, term: int) -> None:
        """Serve this term from now on; raises `Fenced` if the worker serves a newer term."""
        if term < self.term:
            raise Fenced(f"a worker refused a call of term {term}: it serves term {self.term}")
        if term > self.term:
            self.rollouts.drop_all()  # the new driver submits what it needs
        self.term = term

    def _read(self, call: Call[C]) -> TrajectoryBatch:
        stages = [self._read_stage(shards, columns) for shards, columns in call.inputs if columns]
        for chosen in (self._read_stage(shards, columns) for shards, columns in call.inputs if not columns):
            stages = [stage.only(chosen.array("trajectory_id")) for stage in stages]
        return TrajectoryBatch.join(stages) if stages else TrajectoryBatch(pa.table({}))

    def _read_stage(self, shards: tuple[ShardRef, ...], columns: tuple[str, ...]) -> TrajectoryBatch:
        names = ("trajectory_id", *columns)
        return TrajectoryBatch(pa.concat_tables([self.store.read_shard(shard, names) for shard in shards]))


@contextmanager
def _to_the_end(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Take all tensors, whatever happens: they are gathered from, or sent by, processes that would wait for ever."""
    try:
        yield tensors
    finally:
        deque(tensors, maxlen=0)


def _own_address() -> str:
    """This machine's address, for other processes of the run."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return "127.0.0.1"
    address: str = ray.util.get_node_ip_address()
    return address


def _owner_of(role: str) -> str:
    return WEIGHTS_OF.get(role, role)


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread. The process may end before it: its files count only once a record names them."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


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
