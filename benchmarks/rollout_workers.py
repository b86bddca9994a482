"""Kills half of a run's rollout workers every minute, and measures what that costs.

    OMP_NUM_THREADS=1 python benchmarks/rollout_workers.py [--minutes 10] [--quiet-minutes 4] [--workers 8]

A driver and eight rollout workers, each a process of its own, train a tiny model with `hf` in a local folder. The
environment waits before it answers, so that eight processes need little of a processor. The first run is left alone.
In the second one half of the workers are killed every minute, and started again after some seconds. A third run without
workers, whose environment does not wait, repeats the iterations of the second one: it must have its weights.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")

from ratchet.infra.execution.neighbours import WORKERS
from ratchet.infra.runs.run import open_run
from ratchet.infra.store.records import ShardCommit, Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.data.formats import Messages
from ratchet.rlhf.environments.environment import Observation
from tests import tiny
from tests.history import History
from tests.processes import Child, Processes

N = 2
"""Trajectories of a prompt, which is a shard."""
LOOK_S = 0.2


class Waiting:
    """Waits before it answers a turn, which ends the trajectory."""

    stop = ()
    replayable = True

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def reset(self, messages: Messages, ground_truth: Any, extra_info: Any) -> None:
        """Starts a trajectory."""

    def step(self, turn: str) -> Observation:
        """Answers a turn after a while."""
        return self.ended()

    def ended(self) -> Observation:
        """Ends a trajectory that has no more room, after a while."""
        time.sleep(self.seconds)
        return Observation(None)


def config_of(workspace: Path, name: str, shards: int, seconds: float, iterations: int, workers: bool) -> RunConfig:
    environment = {"name": "benchmarks.rollout_workers:Waiting", "options": {"seconds": seconds}}
    return tiny.config(
        workspace,
        run__name=name,
        data__prompts_per_iteration=shards,
        rollout__prompts_per_shard=1,
        rollout__n=N,
        rollout__environment=environment,
        rollout__workers=workers,
        reward__function="tests.rewards:letters",
        algorithm={"advantage": {"type": "grpo"}},
        critic=None,
        actor={"lr": 1e-3, "mini_batch_trajectories": N * shards, "micro_batch_tokens": 8192},
        checkpoint__every=1000,
        train__iterations=iterations,
    )


def train(config: RunConfig) -> None:
    """Trains without Prefect, in a process of its own."""
    from ratchet.flows.train import drive

    drive(config, take_over=False)


@dataclass
class Slot:
    """The place of a worker that is started again after it was killed."""

    config: RunConfig
    processes: Processes
    child: Child | None = None
    began: float = 0.0
    alive_s: float = 0.0
    """Seconds in which a process was in this place and had begun to beat."""
    known: set[str] = field(default_factory=set)

    @property
    def beats(self) -> set[str]:
        folder = Path(self.config.run.store.removeprefix("file://")) / self.config.run.name / WORKERS
        pid = None if self.child is None else self.child.process.pid
        return {path.name for path in folder.glob(f"*-{pid}-*")}

    def start(self) -> None:
        command = "rollout-worker", self.config.run.name, "--store", self.config.run.store
        self.child, self.began = self.processes.cli(*command), 0.0

    def look(self) -> None:
        """Notes when the worker begins to beat."""
        if self.child is not None and not self.began and self.beats:
            self.began = time.monotonic()

    def kill(self) -> None:
        if self.child is not None:
            self.end_of_life()
            self.child.process.kill()
            self.child.process.join()
            self.child = None

    def end_of_life(self) -> None:
        if self.began:
            self.alive_s += time.monotonic() - self.began
            self.began = time.monotonic()


@dataclass(frozen=True)
class Result:
    per_s: float
    """Trajectories that were committed in a second."""
    alive: float
    """Share of the seconds of all places of workers in which one was alive."""
    kills: int
    by_workers: float
    """Share of the shards that workers committed."""
    closed: int
    weights: Weights
    """After the closed iterations."""
    twice: int
    """Shards that were committed more than once."""
    lost: int
    """Shards of closed iterations without a commit."""
    strangers: int
    """Files of trajectories in closed iterations that no record names."""


@contextmanager
def started(folder: Path) -> Iterator[Processes]:
    folder.mkdir()
    processes = Processes(folder)
    try:
        yield processes
    finally:
        processes.close()


def measured(
    config: RunConfig, processes: Processes, workers: int, shards: int, minutes: float, every: float, away: float
) -> Result:
    """Runs a driver and workers for so many minutes, after the first iteration and when all workers have begun.

    Args:
        every: Seconds between two times at which half of the workers are killed; 0: never.
        away: Seconds until they are started again.
    """
    driver = processes.call(train, config)
    while not (Path(config.run.store.removeprefix("file://")) / config.run.name / "log/000000000000.json").exists():
        assert driver.process.is_alive(), driver.text
        time.sleep(LOOK_S)
    slots = [Slot(config, processes) for _ in range(workers)]
    for slot in slots:
        slot.start()
    log = RunStore.at(f"{config.run.store}/{config.run.name}").log
    while not all(slot.began for slot in slots) or not log.read().iteration:
        for slot in slots:
            slot.look()
            assert slot.child is not None
            assert slot.child.process.is_alive(), slot.child.text
        time.sleep(LOOK_S)
    began = time.monotonic()
    first_wall = time.time()
    for slot in slots:
        slot.began = began
    kills, next_kill, turn = 0, began + every, 0
    starts: list[tuple[float, Slot]] = []
    while (now := time.monotonic()) < began + 60 * minutes:
        assert driver.process.is_alive(), driver.text
        if every and now >= next_kill:
            for slot in slots[turn::2]:
                slot.kill()
                starts.append((now + away, slot))
                kills += 1
            turn, next_kill = 1 - turn, next_kill + every
        for at, slot in list(starts):
            if now >= at:
                slot.start()
                starts.remove((at, slot))
        for slot in slots:
            slot.look()
            if slot.child is not None:
                assert slot.child.process.is_alive(), slot.child.text
        time.sleep(LOOK_S)
    for slot in slots:
        slot.end_of_life()
    seconds = time.monotonic() - began
    for child in (*(slot.child for slot in slots), driver):
        if child is not None:
            child.process.kill()
            child.process.join()
    history = History.of(config)
    records = [record for record in history.records if record.at.timestamp() >= first_wall]
    generated = [
        (record.worker, commit)
        for record in records
        for commit in record.commits
        if isinstance(commit, ShardCommit) and commit.stage == "generate"
    ]
    per_shard = {place[1:]: times for place, times in history.shards.items() if place[0] == "generate"}
    closed = history.state.iteration
    named = {shard.data.key for shard in history.commits(ShardCommit)}
    files = [path.relative_to(history.folder).as_posix() for path in history.folder.glob("trajectories/*/*/[!.]*")]
    of_closed = [key for key in files if int(key.split("iteration=")[1][:6]) < closed]
    return Result(
        per_s=sum(shard.data.rows for _, shard in generated) / seconds,
        alive=sum(slot.alive_s for slot in slots) / (workers * seconds),
        kills=kills,
        by_workers=sum(worker is not None for worker, _ in generated) / len(generated),
        closed=closed,
        weights=history.state.starting["actor"],
        twice=sum(times > 1 for times in per_shard.values()),
        lost=sum((iteration, shard) not in per_shard for iteration in range(closed) for shard in range(shards)),
        strangers=len(set(of_closed) - named),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--quiet-minutes", type=float, default=4, help="minutes of the run without kills")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--every", type=float, default=60, help="seconds between kills")
    parser.add_argument("--away", type=float, default=12, help="seconds until a killed worker is started again")
    parser.add_argument("--seconds", type=float, default=10, help="seconds that the environment waits")
    parser.add_argument("--shards", type=int, default=45)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        workspace = tiny.workspace(Path(temporary))
        tiny.prompt_file(workspace / "prompts.parquet", prompts=1000)
        results = {}
        for name, minutes, every in (
            ("quiet", arguments.quiet_minutes, 0.0),
            ("killed", arguments.minutes, arguments.every),
        ):
            config = config_of(workspace, name, arguments.shards, arguments.seconds, 10_000, workers=True)
            with started(workspace / f"processes-{name}") as processes:
                results[name] = measured(
                    config, processes, arguments.workers, arguments.shards, minutes, every, arguments.away
                )
            print(name, results[name], flush=True)
        quiet, killed = results["quiet"], results["killed"]
        alone = config_of(workspace, "alone", arguments.shards, 0.0, killed.closed, workers=False)
        with started(workspace / "processes-alone") as processes:
            child = processes.call(train, alone)
            assert child.wait(7200) == 0, child.text
        state = open_run(f"{alone.run.store}/alone").state
        # the driver generates, too, and is not killed
        share = (arguments.workers * killed.alive + 1) / (arguments.workers * quiet.alive + 1)
        print(
            f"{killed.kills} kills in {arguments.minutes:g} minutes: {killed.per_s:.2f} trajectories/s, without kills "
            f"{quiet.per_s:.2f}; {killed.alive:.0%} of the worker-seconds alive: "
            f"{killed.per_s / quiet.per_s / share:.0%} of the proportional throughput; {killed.closed} iterations, "
            f"{killed.by_workers:.0%} of the shards by workers; {killed.twice} shards committed twice, {killed.lost} "
            f"lost, {killed.strangers} files in closed iterations that no record names; the weights "
            f"{'are' if state.weights['actor'] == killed.weights else 'ARE NOT'} those of a run without workers"
        )


if __name__ == "__main__":
    main()
