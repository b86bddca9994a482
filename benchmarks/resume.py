"""Measures resuming and inspecting a run after 10 iterations and after 1,000.

    OMP_NUM_THREADS=1 python benchmarks/resume.py [--repeats 50] [--long 1000]

Two real runs of a tiny model in a local folder differ only in their length; the long one takes some minutes to make.
Resuming (reading the log, claiming, sweeping) is timed alternately on both, so that other load affects both equally.
For all other commands, the script counts the requests to the store.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")

from rich.console import Console

from ratchet.flows.commands import tables
from ratchet.flows.train import drive
from ratchet.infra.execution.claims import claim
from ratchet.infra.progress import Event, IterationClosed, listening
from ratchet.infra.runs.run import open_run
from ratchet.infra.store import object_store
from ratchet.infra.store.object_store import LocalBackend, ObjectStore
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.config import RunConfig
from ratchet.tasks.analysis.explain import explain
from ratchet.tasks.analysis.plan import fork_run
from ratchet.tasks.pipeline import STAGES
from tests import tiny

SHORT = 10
NOWHERE = Console(file=io.StringIO())


class Counting(LocalBackend):
    """A local backend that counts its requests by kind."""

    requests: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("create", "put", "get", "size", "read", "delete", "list"):
            Counting.requests[name] += 1
        return super().__getattribute__(name)


def run_config(workspace: Path, iterations: int) -> RunConfig:
    return tiny.config(
        workspace,
        run__name=f"of-{iterations}",
        data__prompts_per_iteration=1,
        rollout__prompts_per_shard=1,
        rollout__max_response_tokens=1,
        reward__function="length",
        algorithm={"advantage": "grpo"},
        critic=None,
        actor={"mini_batch_trajectories": 2},
        checkpoint__every=100,
        train__iterations=iterations,
    )


def make(config: RunConfig) -> None:
    """Trains the run, without recording it in Prefect."""

    def progress(event: Event) -> None:
        if isinstance(event, IterationClosed) and event.iteration % 100 == 99:
            print(f"{event.iteration + 1} iterations of {config.train.iterations}", flush=True)

    with listening(progress):
        drive(config, take_over=False)


def resume(config: RunConfig) -> float:
    store = RunStore(ObjectStore(url(config)))
    started = time.perf_counter()
    store.log.read()
    claim(store, config, initial=store.state.initial)
    store.sweep(stage.name for stage in STAGES)
    return 1e3 * (time.perf_counter() - started)


def url(config: RunConfig) -> str:
    return f"{config.run.store}/{config.run.name}"


def commands(config: RunConfig) -> dict[str, Callable[[], object]]:
    """Returns commands that inspect or fork a run, by name."""
    changed = config.with_values({"actor.lr": 0.5})
    child = config.with_values({"run.name": f"fork-of-{config.run.name}", "actor.lr": 0.5})
    last = config.train.iterations - 1
    return {
        "status --last 10": lambda: tables.status(NOWHERE, open_run(url(config)), 10),
        "show": lambda: tables.show(NOWHERE, open_run(url(config)), None, None, None, 20, "table"),
        "plan": lambda: tables.plan(NOWHERE, open_run(url(config)), changed, last, config.run.name),
        "explain": lambda: explain(open_run(url(config)), last),
        "fork": lambda: fork_run(open_run(url(config)), child, last, "advantages"),
    }


def count(command: Callable[[], object]) -> Counter[str]:
    Counting.requests = Counter()
    command()
    return Counter(Counting.requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--long", type=int, default=1000, help="iterations of the long run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        workspace = tiny.workspace(Path(temporary))
        configs = [run_config(workspace, iterations) for iterations in (SHORT, arguments.long)]
        for config in configs:
            make(config)
        object_store.LocalBackend = Counting  # type: ignore[misc]
        counts = [
            {"resume": count(lambda config=config: resume(config))}
            | {name: count(command) for name, command in commands(config).items()}
            for config in configs
        ]
        times: dict[str, list[float]] = {config.run.name: [] for config in configs}
        for _ in range(arguments.repeats):
            for config in configs:
                times[config.run.name].append(resume(config))
        medians = [statistics.median(milliseconds) for milliseconds in times.values()]
        print(f"resuming: {medians[0]:.1f} and {medians[1]:.1f} ms, ratio {medians[1] / medians[0]:.2f}")
        print(f"\n| requests | at {SHORT} | at {arguments.long} |\n|---|---|---|")
        for name, short in counts[0].items():
            print(f"| {name} | {listed(short)} | {listed(counts[1][name])} |")


def listed(requests: Counter[str]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in sorted(requests.items()))


if __name__ == "__main__":
    main()
