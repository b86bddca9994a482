"""Drivers in processes of their own, which tests kill, stop and count; the product has no hooks for them.

A child is forked from a server that has imported everything and started nothing (importing takes longer than a run).
Inside the child, wrapped classes count its computations and inject faults.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from prefect.context import refresh_global_settings_context

from ratchet.rlhf.config import RunConfig

PRELOAD = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "prefect.engine",
    "prefect.flow_engine",
    "prefect.task_engine",
    "prefect.telemetry.run_telemetry",
    "pyarrow.dataset",
    "ratchet.flows.train",
    "ratchet.flows.commands.app",
    "ratchet.infra.runs.run",
    "ratchet.rlhf.rollout.hf_engine",
    "ratchet.rlhf.train.torch_engine",
    "tests.processes",
    "tests.rewards",
)


def forking() -> ForkServerContext:
    """Returns the context of processes that have imported everything and started nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


@dataclass(frozen=True)
class Fault:
    """A signal that the process sends itself, or a delay, or an error, at an operation whose key matches."""

    operation: str
    """`put` or `create` of the store's backend; `step` of the optimizer; `state`: a flow run reports to Prefect."""
    match: str = ""
    """A pattern in the key, or in the data if it starts with `{`."""
    when: str = "after"
    count: int = 1
    """The number of the operation that fails, from 1; 0: each of them."""
    action: int = signal.SIGKILL
    delay_s: float = 0.0
    outage_s: float = 0.0
    """Duration for which such operations raise an error, before or after they are done."""
    until: str = ""
    r"""A `put` waits until a record of the log holds this; ``\\1`` in it is the first group of `match`."""


@dataclass
class Child:
    """A running process."""

    process: BaseProcess
    output: Path
    counts: Path

    def wait(self, timeout: float = 900.0) -> int:
        """Returns the exit code; a signal's number is negative."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.signal(signal.SIGABRT)  # the stacks of its threads are the last that it prints
            self.process.join()
            raise AssertionError(f"still running after {timeout} s: {self.text}")
        return self.process.exitcode

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    @property
    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    @property
    def computed_shards(self) -> list[tuple[str, int, int]]:
        """Returns the worker's computations: (stage, iteration, shard)."""
        return [(name, iteration, shard) for name, iteration, shard in self._counted() if shard >= 0]

    @property
    def engine_calls(self) -> list[tuple[str, int]]:
        """Returns the engines' computations, replays included: (stage that asks for it, iteration)."""
        return [(name, iteration) for name, iteration, shard in self._counted() if shard < 0]

    def _counted(self) -> list[tuple[str, int, int]]:
        lines = self.counts.read_text().splitlines() if self.counts.exists() else []
        return [(name, iteration, shard) for name, iteration, shard in map(json.loads, lines)]


@dataclass
class Processes:
    """Starts children; their output and counts are in `folder`."""

    folder: Path
    children: list[Child] = field(default_factory=list)

    def train(self, config: RunConfig, *faults: Fault, setup: Callable[[], None] | None = None) -> Child:
        """Starts the train flow, as another Python program would call it."""
        return self._start(_train, config, faults, setup)

    def cli(self, *arguments: object, faults: tuple[Fault, ...] = (), setup: Callable[[], None] | None = None) -> Child:
        return self._start(_cli, [str(argument) for argument in arguments], faults, setup)

    def call(self, function: Callable[[Any], None], argument: Any, *faults: Fault) -> Child:
        """Calls a function of a module of tests."""
        return self._start(function, argument, faults, None)

    def _start(self, run: Callable[[Any], None], argument: Any, faults: tuple[Fault, ...], setup: Any) -> Child:
        name = f"{len(self.children):03d}"
        output, counts = self.folder / f"{name}.out", self.folder / f"{name}.counts"
        later = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "PREFECT_", "RAY_"))}
        process = forking().Process(
            target=_child, args=(output, counts, faults, setup, run, argument, later), daemon=True
        )
        process.start()
        self.children.append(Child(process, output, counts))
        return self.children[-1]

    def close(self) -> None:
        for child in self.children:
            if child.process.is_alive():
                child.process.kill()
            child.process.join()


# In the child.


def _child(
    output: Path,
    counts: Path,
    faults: tuple[Fault, ...],
    setup: Callable[[], None] | None,
    run: Callable[[Any], None],
    argument: Any,
    environment: dict[str, str],  # what was set since the fork server began
) -> None:
    os.environ.update(environment)
    refresh_global_settings_context()  # the fork server read them when it imported Prefect
    with output.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    faulthandler.enable()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    _count(counts)
    for fault in faults:
        _install(fault)
    if setup is not None:
        setup()
    run(argument)


def grace(seconds: float) -> None:
    """The `setup` of a child that abandons its work so many seconds after it was asked to stop."""
    import ratchet.infra.execution.stopping

    ratchet.infra.execution.stopping.GRACE_S = seconds


def _train(config: RunConfig) -> None:
    from ratchet.flows.train import train

    train(config)


def _cli(arguments: list[str]) -> None:
    from ratchet.flows.commands.app import main

    sys.argv = ["ratchet", *arguments]
    main()


def _install(fault: Fault) -> None:
    import torch
    from prefect.client.orchestration import SyncPrefectClient

    from ratchet.infra.store.object_store import FsspecBackend, LocalBackend

    owners, method = {
        "put": ((LocalBackend, FsspecBackend), "put"),
        "create": ((LocalBackend, FsspecBackend), "create"),
        "step": ((torch.optim.AdamW,), "step"),
        "state": ((SyncPrefectClient,), "set_flow_run_state"),
    }[fault.operation]
    seen = 0
    started: list[float] = []

    def strike(owner: Any, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        found = None
        if fault.match:
            key, data = arguments
            text = data.decode(errors="replace") if fault.match.startswith("{") else key
            found = re.search(fault.match.removeprefix("{"), text)
            if not found:
                return
        seen += 1
        if fault.outage_s:
            started.append(time.monotonic())
            if time.monotonic() < started[0] + fault.outage_s:
                raise ConnectionError("the store does not answer")
        elif fault.count in (0, seen):
            if fault.until:
                assert found is not None
                _await_record(owner.root / "log", found.expand(fault.until))
            elif fault.delay_s:
                print(f"waiting at {fault.match}")
                time.sleep(fault.delay_s)
            else:
                os.kill(os.getpid(), fault.action)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
            if fault.when == "before":
                strike(self, arguments)
            result = original(self, *arguments, **options)
            if fault.when == "after":
                strike(self, arguments)
            return result

        return wrapped

    for owner in owners:
        setattr(owner, method, wrap(getattr(owner, method)))


def _await_record(log: Path, text: str) -> None:
    deadline = time.monotonic() + 900
    while not any(text in path.read_text() for path in log.glob("[0-9]*.json")):
        assert time.monotonic() < deadline, f"no record says {text}"
        time.sleep(0.02)


def _count(counts: Path) -> None:
    """Writes a line for every computation of the engines, from inside the engines' own calls."""
    from ratchet.infra.workers.worker import Worker
    from ratchet.rlhf.rollout.hf_engine import HFRollout
    from ratchet.rlhf.train.torch_engine import TorchEngine

    file = counts.open("a", buffering=1)  # a line is on its way before anything else can happen

    def write(*what: Any) -> None:
        file.write(json.dumps(what) + "\n")

    def after(owner: type, name: str, describe: Callable[..., list[tuple[Any, ...]]]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)  # so that Ray sends it by its name, and its workers call their own
        def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
            result = original(self, *arguments, **options)
            for what in describe(self, *arguments, **options):
                write(*what)
            return result

        setattr(owner, name, wrapped)

    def place(trajectory_id: str) -> int:
        iteration = re.match(r"it(\d+)-", trajectory_id)
        return 0 if iteration is None else int(iteration[1])  # those of `ratchet serve` have no iteration

    def of(stage: str, batch: Any) -> tuple[Any, ...]:
        if "trajectory_id" not in batch:  # a fit's
            return "fit", 0, -1
        return stage, place(batch.list("trajectory_id")[0]), -1

    def inferred(self: Any, batches: Any, outputs: Any, **_: Any) -> list[tuple[Any, ...]]:
        stage = "values" if self.head == "value" else "old_log_probs" if self.optimizer else "ref_log_probs"
        return [of(stage, batch) for batch in batches if len(batch)]  # dynamic sampling can empty a shard

    def updated(self: Any, batch: Any, *_: Any) -> list[tuple[Any, ...]]:
        return [of("update_critic" if self.head == "value" else "update_actor", batch)] if len(batch) else []

    def rows(self: Any, asked: Any) -> list[tuple[Any, ...]]:
        return [(one.call.stage, one.call.iteration, one.call.shard) for one in asked]

    after(Worker, "rows", rows)
    after(Worker, "finish", lambda self, asked, *_: rows(self, [asked]))  # of a shard that was generated
    after(HFRollout, "_run", lambda self, rows, _: [("generate", place(rows[0].request.trajectory_id), -1)])  # a batch
    after(TorchEngine, "infer_each", inferred)
    after(TorchEngine, "update", updated)
