"""Processes that compute one model together, like the workers of a group, through gloo."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from tests.processes import forking

P = ParamSpec("P")
T = TypeVar("T")
LIMIT_S = 900.0
"""Time limit of a call; a busy machine takes a minute."""


class Ranks:
    """Calls a function on all ranks at once."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        context = forking()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, count, str(folder / "rendezvous")), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Returns the function's results by rank."""
        assert all(process.is_alive() for process in self.processes), "an earlier call got stuck"
        for pipe in self.pipes:
            pipe.send((function, arguments))
        deadline = time.monotonic() + LIMIT_S  # of all together
        answers = [
            pipe.recv() if pipe.poll(max(0.0, deadline - time.monotonic())) else (False, "no answer in 15 minutes")
            for pipe in self.pipes
        ]
        bad = [f"rank {rank}: {answer}" for rank, (good, answer) in enumerate(answers) if not good]
        if bad:
            self.close()  # whoever has not failed may wait for the other for ever
        assert not bad, "\n".join(bad)
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, rank: int, count: int, rendezvous: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from torch.utils._pytree import tree_map_only

    from ratchet.rlhf.distributed import ranks
    from tests.simulated import device

    if device.VARIABLE in os.environ:
        device.enable()
    ranks.join(rank, count, f"file://{rendezvous}")
    while True:
        function, arguments = pipe.recv()
        try:
            result = function(*arguments)
            pipe.send((True, tree_map_only(torch.Tensor, torch.Tensor.cpu, result)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


_others: list[ProcessPoolExecutor] = []


def in_another_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function in a process that is in no group of ranks, so that it may start and end a group of its own.

    Groups of this process may be in use: engines of a single process have one, too.
    """
    if not _others:
        _others.append(ProcessPoolExecutor(1, forking()))
    try:
        return _others[0].submit(function, *args, **kwargs).result(LIMIT_S)
    except BrokenProcessPool:  # the next call gets another process
        _others.clear()
        raise


@contextmanager
def only_rank(rank: int, count: int) -> Iterator[None]:
    """Acts as one rank of a group whose other ranks do not exist; see `in_another_process`."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # it remembers the mesh as the rank before saw it
    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def variable(worker: object, name: str) -> str | None:
    """Returns the value of a variable in the environment of a pool's process."""
    return os.environ.get(name)


def one_rank_fails(context: Any) -> Any:
    """A stage that fails to read on one rank, while the other waits for it."""
    from ratchet.infra.store.object_store import StoreUnavailable
    from ratchet.rlhf.distributed import ranks

    if ranks.rank() == 1:
        raise StoreUnavailable("the store does not answer rank 1")
    ranks.gathered("rank 0 waits here for rank 1")
    raise AssertionError("they never meet")


def one_rank_never_answers(context: Any) -> Any:
    """A stage in which one rank waits for another forever."""
    from ratchet.rlhf.distributed import ranks

    if ranks.rank() == 1:
        threading.Event().wait()
    ranks.gathered("rank 0 waits here for rank 1")
    raise AssertionError("they never meet")
