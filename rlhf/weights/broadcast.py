"""Broadcasts new weights from a trainer to rollouts in other processes.

The trainer's first rank and all processes of the rollout form their own process group, beside the one in which each
pool computes. Weights go from GPU to GPU by NCCL if every member has a GPU, and otherwise by gloo.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.distributed.device_errors import is_lost
from ratchet.rlhf.distributed.rendezvous import Rendezvous, connected
from ratchet.rlhf.errors import RatchetError, in_one_line
from ratchet.rlhf.weights.buckets import Memory, Packed, send

if TYPE_CHECKING:
    from torch import Tensor

SENDER = 0
"""Rank of the trainer."""


class LinkLost(RatchetError):
    """A member of a link is gone, or cannot be reached."""


class WeightLink:
    """One member's end of a link."""

    def __init__(self, rendezvous: Rendezvous | str, rank: int, count: int, host: str, timeout_s: float) -> None:
        """Connects; returns once all members have connected.

        Args:
            rendezvous: the sender's rendezvous; its URL, for the other members.
            rank: this member's index; `SENDER` sends.
            host: this machine's address, to which the other members connect.
            timeout_s: a transfer fails if it makes no progress for this many seconds.

        Raises:
            LinkLost: a member cannot be reached.
        """
        timeout = timedelta(seconds=timeout_s)
        with losing():
            if isinstance(rendezvous, str):
                self._store = connected(rendezvous, timeout)
            else:
                self._store = rendezvous.store
            self._host_group: Any = gloo_group(PrefixStore("gloo", self._store), rank, count, host, timeout)
            gpus = torch.tensor([int(accelerator.is_available())])
            self._host_group.allreduce([gpus]).wait()
            self._group: Any = self._host_group
            self._device = torch.device("cpu")
            if int(gpus) == count:
                self._device = accelerator.device()
                self._group = nccl_group(PrefixStore("nccl", self._store), rank, count, timeout)

    def send(
        self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, adapter_config: bytes | None = None
    ) -> int:
        """Broadcasts weights, once, to all other members; returns the number of bytes sent.

        Args:
            weights: tensors by name, consumed one at a time, to the end.
            dtype: type of the rollout; floating-point tensors are cast to it.
        """

        def deliver(packed: Packed, memory: Memory) -> None:
            self._broadcast_json(packed.as_json())
            self._broadcast(memory.memory[: packed.nbytes])

        self._broadcast_json(
            {"is_sent": True, "adapter_config": None if adapter_config is None else adapter_config.decode()}
        )
        sent = send(weights, dtype, [Memory(self._device), Memory(self._device)], deliver)
        # an empty message ends the transfer
        self._broadcast_json({})
        return sent

    def refuse(self) -> None:
        """Tells the members that wait in `receive` that no weights follow. Raises `LinkLost`."""
        self._broadcast_json({"is_sent": False})

    def receive(self) -> tuple[bytes | None, Iterator[tuple[str, Tensor]]]:
        """Receives the weights that the sender sends.

        Returns:
            PEFT's config (None: not an adapter), and the tensors by name, each valid until the next one is taken. They
            must be consumed to the end.
        """
        beginning = self._broadcast_json()
        if not beginning["is_sent"]:
            raise LinkLost("the trainer has other weights by now")
        adapter_config = beginning["adapter_config"]
        return None if adapter_config is None else adapter_config.encode(), self._tensors()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        buffer = Memory(self._device)
        while fields := self._broadcast_json():
            packed = Packed.from_json(fields)
            memory = buffer.reserve(packed.nbytes)
            self._broadcast(memory[: packed.nbytes])
            yield from packed.tensors(memory)

    def _broadcast_json(self, fields: dict[str, Any] | None = None) -> dict[str, Any]:
        """Sends plain values, or receives them (None)."""
        data = torch.frombuffer(bytearray(json.dumps(fields or {}).encode()), dtype=torch.uint8)
        size = torch.tensor([0 if fields is None else len(data)])
        with losing():
            self._host_group.broadcast(size, SENDER).wait()
            if fields is None:
                data = torch.empty(int(size), dtype=torch.uint8)
            self._host_group.broadcast(data, SENDER).wait()
        received: dict[str, Any] = json.loads(data.numpy().tobytes())
        return received

    def _broadcast(self, memory: Tensor) -> None:
        with losing():
            if len(memory):
                self._group.broadcast(memory, SENDER).wait()
            accelerator.synchronize(memory.device)


@contextmanager
def losing() -> Iterator[None]:
    """Raises PyTorch's errors about a lost connection as `LinkLost`."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise LinkLost(f"the connection for new weights failed: {in_one_line(error)}") from error


def gloo_group(store: Store, rank: int, count: int, host: str, timeout: timedelta) -> Any:
    """Creates a gloo group that listens only on `host`."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, count, options)


def nccl_group(store: Store, rank: int, count: int, timeout: timedelta) -> Any:
    """Creates an NCCL group."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, count, options)
