"""New weights for a rollout with its own copy of the actor: from the same process, another process, or the store."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ratchet.infra.progress import note
from ratchet.infra.store.records import Weights
from ratchet.infra.workers.held_weights import HeldWeights
from ratchet.infra.workers.resources import Resources
from ratchet.infra.workers.role_engines import Engines
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.data.chat_turns import state_of
from ratchet.rlhf.data.prompts import encode
from ratchet.rlhf.distributed import accelerator, ranks
from ratchet.rlhf.distributed.host_buffers import release_memory
from ratchet.rlhf.models.loading import load_actor
from ratchet.rlhf.rollout.engine import Sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ratchet.rlhf.distributed.rendezvous import Rendezvous
    from ratchet.rlhf.rollout.engine import RolloutEngine
    from ratchet.rlhf.train.engine import InferenceEngine
    from ratchet.rlhf.weights.broadcast import WeightLink
    from ratchet.rlhf.weights.stored_state import StoredState

LINK_S = 1800.0
"""Seconds without progress after which a transfer of weights to or from the driver's process fails."""


class RolloutWeights:
    """Transfers of new weights to the rollout of this process, or of the actor's to rollouts of other processes.

    Methods without a docstring answer calls of `Worker`, which describes them.
    """

    def __init__(self, config: RunConfig, engines: Engines, resources: Resources, held: HeldWeights) -> None:
        self._config, self._engines, self._resources, self._held = config, engines, resources, held
        self._has_compared_server = False
        self._rendezvous: Rendezvous | None = None
        self._link: tuple[str, WeightLink] | None = None
        """The link for new weights between this process and others, and the URL of their rendezvous."""

    def copy(self, weights: Weights) -> int | None:
        with self._engines.lock:
            if not self._held.has("actor", weights):
                return None
            actor = self._engines.state_of("actor")
            rollout = self._engines.rollout(generates=False)
            self._held.lose("rollout")
            with _to_the_end(actor.weights(self._dtype)) as tensors:
                moved = rollout.load_weights(tensors, actor.adapter_config)
            self._engines.rollout_is_empty = False
            if self._config.rollout.engine.outlives_runs:
                self._compare_server(rollout, self._engines.model("actor"))
            if self._config.actor.offload_when_idle:  # gathering has taken memory, which the engine needs to wake
                release_memory(accelerator.device())
            return moved

    def load(self, weights: Weights, stored: StoredState | None) -> None:
        """Loads a checkpoint, or the initial weights if there is none."""
        self._held.lose("rollout")
        if stored is not None:
            self._load(stored.tensors(), stored.file("adapter_config.json"))
        elif self._config.rollout.engine.outlives_runs:  # the server may hold other weights
            from ratchet.rlhf.models.hub_layout import hub_weights

            self._load(hub_weights(load_actor(self._config.model, self._config.run.seed)), None)
        else:
            self.end()

    def end(self) -> None:
        """Ends the rollout engine; the next one starts with the initial weights."""
        with self._engines.lock:
            self._held.lose("rollout")
            self._engines.end_rollout()

    def open_rendezvous(self) -> str:
        from ratchet.rlhf.distributed.rendezvous import Rendezvous

        self._rendezvous = Rendezvous(_own_address(), self._timeout_s("actor"))
        return self._rendezvous.url

    def connect(self, url: str, count: int, *, sends: bool) -> bool:
        from ratchet.rlhf.weights.broadcast import SENDER, LinkLost, WeightLink

        if sends and ranks.rank() > 0:
            return True
        rendezvous = self._rendezvous if sends else url
        assert rendezvous is not None, "the trainer has opened it"
        member = SENDER if sends else SENDER + 1 + ranks.rank()
        timeout_s = self._timeout_s("actor" if sends else "rollout")
        self._link = None
        try:
            self._link = url, WeightLink(rendezvous, member, count, _own_address(), timeout_s)
        except LinkLost as error:
            note(str(error))
        return self._link is not None

    def is_connected(self, url: str) -> bool:
        is_gathering = "actor" in self._engines.roles and ranks.rank() > 0  # rank 0 sends
        return is_gathering or (self._link is not None and self._link[0] == url)

    def send(self, weights: Weights) -> int | None:
        from ratchet.rlhf.weights.broadcast import LinkLost

        link = None if self._link is None else self._link[1]
        try:
            with self._engines.lock:
                if not self._held.has("actor", weights):  # on all ranks
                    if link is not None:
                        link.refuse()
                    return None
                actor = self._engines.state_of("actor")
                with _to_the_end(actor.weights(self._dtype)) as tensors:
                    if ranks.rank() > 0:  # takes part in gathering them
                        return 0
                    assert link is not None, "the caller has connected the workers"
                    return link.send(tensors, self._dtype, actor.adapter_config)
        except LinkLost as error:
            note(str(error))
            self._link = None
            return None

    def receive(self, weights: Weights) -> bool:
        from ratchet.rlhf.weights.broadcast import LinkLost

        assert self._link is not None, "the caller has connected the workers"
        is_changed = False
        try:
            adapter_config, received = self._link[1].receive()
            is_changed = True
            self._held.lose("rollout")
            with _to_the_end(received) as tensors:  # otherwise the sender waits for this process
                self._load(tensors, adapter_config)
        except LinkLost as error:
            note(str(error))
            self._link = None
            if is_changed:
                self.end()  # some of its tensors are new, and some are old
            return False
        return True

    @property
    def _dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self._config.model.dtype)
        return dtype

    def _timeout_s(self, role: str) -> float:
        pool = self._config.pool_of(role)
        return LINK_S if pool is None else self._config.pools[pool].timeout_s

    def _load(self, tensors: Iterable[tuple[str, Tensor]], adapter_config: bytes | None) -> None:
        """Loads weights into a rollout in a different process from the actor."""
        rollout = self._engines.rollout(generates=False)
        self._engines.rollout_is_empty = False
        if not self._config.rollout.engine.outlives_runs or self._has_compared_server:
            rollout.load_weights(tensors, adapter_config)
            return
        from ratchet.rlhf.models.hub_layout import copy_weights, hub_weights
        from ratchet.rlhf.train.torch_engine import TorchEngine

        # there is no actor here to compare the server's log-probs with, so load one
        model = load_actor(self._config.model, self._config.run.seed)
        copy_weights(tensors, model)
        rollout.load_weights(hub_weights(model))
        actor = TorchEngine(model, "policy", dtype=self._config.model.dtype, trainable=False)
        self._compare_server(rollout, actor)

    def _compare_server(self, rollout: RolloutEngine, actor: InferenceEngine) -> None:
        """Compares a server's log-probs with those of the actor, whose weights it has just loaded. Runs once."""
        if self._has_compared_server:
            return
        from ratchet.infra.workers.log_probs_check import check_log_probs
        from ratchet.rlhf.rollout.server_engine import ServerRollout

        assert isinstance(rollout, ServerRollout)
        data, rollout_config = self._config.data, self._config.rollout
        dataset = self._resources.dataset(data.train)
        [row] = dataset.draw(self._config.run.seed, 0, 1)
        _, ids = encode(
            dataset[row],
            self._resources.tokenizer,
            max_tokens=data.max_prompt_tokens,
            truncation=data.truncation,
            system_prompt=data.system_prompt,
        )
        images = state_of(self._resources.tokenizer).images
        ids = ids if images is None else images.left_out(ids)
        check_log_probs(rollout, actor, ids, Sampling.of_rollout(rollout_config, self._config.run.seed))
        self._has_compared_server = True


@contextmanager
def _to_the_end(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Consumes all tensors, even after an error."""
    try:
        yield tensors
    finally:
        # otherwise the processes that gather or send the rest would wait forever
        deque(tensors, maxlen=0)


def _own_address() -> str:
    """Returns this machine's address, for other processes of the run."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return "127.0.0.1"
    address: str = ray.util.get_node_ip_address()
    return address
