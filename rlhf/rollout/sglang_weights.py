"""Broadcasts new weights, bucket by bucket, to SGLang servers that share no folder with the trainer.

The trainer's first rank and all processes of the servers form a process group, which lives for one transfer: NCCL if
each of them has a GPU, otherwise gloo. HTTP requests only announce the next bucket.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

import torch
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from ratchet.rlhf import event_loop
from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.distributed.rendezvous import Rendezvous
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rollout.server_requests import Ask, Away
from ratchet.rlhf.weights.broadcast import SENDER, gloo_group, losing, nccl_group
from ratchet.rlhf.weights.buckets import Memory, Packed, send

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class SGLangLink:
    """The trainer's end of a connection to servers, for one transfer."""

    def __init__(self, servers: Sequence[Ask], name: str, group: ProcessGroup, device: torch.device) -> None:
        """Use `connect` instead."""
        self._servers, self._name, self._group, self._device = servers, name, group, device

    @classmethod
    async def connect(cls, servers: Sequence[Ask]) -> Self:
        """Connects to all servers, which abort their requests and wait for weights.

        Raises:
            Away: a server does not answer.
            LinkLost: a server cannot reach this process.
            UserError: a server cannot take weights in this way.
        """
        counts, on_gpu = [], accelerator.device().type == "cuda"
        for server in servers:
            info = await server("/server_info")
            if info["dp_size"] > 1 or info["pp_size"] > 1:
                raise UserError(
                    f"{server.url} takes weights only from a folder, since it has data or pipeline parallelism: set "
                    "rollout.engine.weights_folder"
                )
            counts.append(info["tp_size"])
            on_gpu = on_gpu and info["device"] == "cuda"
        await event_loop.gather([_begin(server) for server in servers])
        name, timeout = f"ratchet-{secrets.token_hex(8)}", timedelta(seconds=servers[0].timeout_s)
        host = await asyncio.to_thread(_own_address, servers)
        rendezvous = Rendezvous(host, timeout.total_seconds())
        backend, place = ("nccl", "cuda") if on_gpu else ("gloo", "cpu")
        url, size = urlsplit(rendezvous.url), 1 + sum(counts)
        asked = []
        for index, server in enumerate(servers):
            body = {
                "master_address": url.hostname,
                "master_port": url.port,
                "rank_offset": 1 + sum(counts[:index]),
                "world_size": size,
                "group_name": name,
                "backend": backend,
            }
            asked.append(server("/init_weights_update_group", body))
        # the key prefixes of PyTorch's init_process_group, which the servers use
        store: Store = PrefixStore(f"{place}/", PrefixStore(f"{name}/", PrefixStore(name, rendezvous.store)))
        form: Callable[[], ProcessGroup] = (
            partial(nccl_group, store, SENDER, size, timeout)
            if on_gpu
            else partial(gloo_group, store, SENDER, size, host, timeout)
        )
        group = await _meanwhile(asked, form)
        return cls(servers, name, group, accelerator.device() if on_gpu else torch.device("cpu"))

    def send(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> int:
        """Broadcasts weights, consumed one at a time and cast to `dtype`, to all servers; returns the number of
        bytes."""
        return send(weights, dtype, [Memory(self._device), Memory(self._device)], self._deliver)

    def _deliver(self, packed: Packed, memory: Memory) -> None:
        body = {
            "names": packed.names,
            "dtypes": [packed.dtype] * len(packed.names),
            "shapes": packed.shapes,
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        asked = [server("/update_weights_from_distributed", body) for server in self._servers]
        event_loop.run(_meanwhile(asked, partial(self._broadcast, memory.memory[: packed.nbytes])))

    def _broadcast(self, memory: Tensor) -> None:
        self._group.broadcast(memory, SENDER).wait()
        accelerator.synchronize(memory.device)

    async def finish(self) -> None:
        """Makes the servers use the weights that they received. Raises `Away` or `UserError`."""
        await event_loop.gather([_end(server) for server in self._servers])

    async def close(self) -> None:
        """Closes the connection."""
        await event_loop.gather([self._forget(server) for server in self._servers])
        self._group.abort()

    async def _forget(self, server: Ask) -> None:
        with suppress(Away, UserError):  # it died, or no longer knows the group
            await server("/destroy_weights_update_group", {"group_name": self._name})


async def _begin(server: Ask) -> None:
    # a cancelled request keeps running for seconds
    await server("/abort_request", {"abort_all": True})
    try:
        await server("/begin_weight_update", {})
    except UserError:  # a trainer that died left its update open
        await server("/end_weight_update", {})
        await server("/begin_weight_update", {})


async def _end(server: Ask) -> None:
    await server("/end_weight_update", {})
    await server(f"/flush_cache?timeout={server.timeout_s}", {})


async def _meanwhile(asked: Sequence[Coroutine[Any, Any, Any]], part: Callable[[], T]) -> T:
    """Sends the requests while this process runs its part in a thread; returns the part's result, or the first error.

    The part blocks until the servers do theirs, possibly for long if one refuses: its thread may be left behind.
    """
    result = Future[T]()
    result.set_running_or_notify_cancel()  # so that it cannot be cancelled any more

    def run() -> None:
        try:
            with losing():
                result.set_result(part())
        except BaseException as error:
            result.set_exception(error)

    async def own() -> T:
        threading.Thread(target=run, name="weights", daemon=True).start()
        return await asyncio.wrap_future(result)

    done: T = (await event_loop.gather([own(), *asked]))[0]
    return done


def _own_address(servers: Sequence[Ask]) -> str:
    """Returns an address of this machine that the servers reach, one for other machines if there are any."""
    addresses: list[str] = []
    for server in servers:
        place = urlsplit(server.url)
        port = place.port or (443 if place.scheme == "https" else 80)
        try:
            with socket.create_connection((place.hostname, port), timeout=server.timeout_s) as connection:
                addresses.append(connection.getsockname()[0])
        except OSError as error:
            raise Away(f"{server.url} does not answer: {error}") from None
    return next((address for address in addresses if address not in ("127.0.0.1", "::1")), addresses[0])
