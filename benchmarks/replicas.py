"""Measures the stage generate on two replicas, one of them half as fast, against an ideal distribution of the work.

    python benchmarks/replicas.py [--rounds 3] [--trajectories 512] [--max-in-flight 32 512]

A pool of two processes on Ray, each with its own vLLM on the CPU (one thread); a Llama with 5 M parameters, random
weights, float32; 512 trajectories of 32 prompt and 16 to 112 response tokens (drawn with a fixed seed, end-of-sequence
ignored), in shards of 16 prompts x 4. The processes of the second vLLM are stopped for half of the time: 20 ms run,
20 ms stopped. The stage is that of a real run, from its start until it is committed.

The speed of a replica is the tokens per second of the trajectories that it completes between 20 % and 80 % of the
stage, so the two speeds are measured at the same time and contain neither start nor end. "Ideal" is all tokens
divided by the sum of the speeds. "Halves" is the time that the slow replica would need for half of the tokens. A
replica "ends" with its last trajectory. The first round is warm-up and does not count; the table has the median round.

    python benchmarks/replicas.py --drop 16 64

Seconds until so many replicas have dropped one of two open shards, while they wait for trajectories of the other one.
The driver's part is real; a replica is a thread that answers one call after another, as a process on Ray does, and one
that drops shards meanwhile.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # otherwise both vLLMs compute on the same core
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")

import numpy as np
import psutil

from benchmarks import parts
from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.replicas import Feed, Replicas
from ratchet.infra.store.records import Weights
from ratchet.infra.workers.calls import Context, ShardStart
from ratchet.infra.workers.rollouts import Generated
from ratchet.infra.workers.worker import WAIT_S, Worker
from ratchet.tasks.restore import ensure_weights
from ratchet.tasks.stages.generate import GENERATE, GenerateConfig, begin

SAMPLES, PROMPT, PROMPTS_PER_SHARD = 4, 32, 16
SHORTEST, LONGEST = 16, 112
SLICE_S = 0.02


def length_of(trajectory_id: str) -> int:
    """Returns the tokens of a trajectory's response; the id ends with the numbers of prompt and sample, p00012-s03."""
    _, prompt, sample = trajectory_id.split("-")
    return int(np.random.default_rng([int(prompt[1:]), int(sample[1:])]).integers(SHORTEST, LONGEST + 1))


def begin_limited(context: Context[GenerateConfig]) -> ShardStart:
    start = begin(context)
    for dialogue in start.dialogues:
        dialogue.request = replace(dialogue.request, max_tokens=length_of(dialogue.request.trajectory_id))
    return start


STAGE = replace(GENERATE, begin=begin_limited)


def engine_process(worker: Worker) -> int:
    """Returns the process id of a worker's vLLM."""
    [child] = [child for child in psutil.Process().children() if "ratchet.rlhf.rollout.vllm_process" in child.cmdline()]
    return child.pid


@contextmanager
def half_as_fast(process: int) -> Iterator[None]:
    """Stops a process and its children for half of the time."""
    root = psutil.Process(process)
    slowed, ended = [root, *root.children(recursive=True)], threading.Event()

    def alternate() -> None:
        while not ended.wait(SLICE_S):
            for child in slowed:
                child.suspend()
            time.sleep(SLICE_S)
            for child in slowed:
                child.resume()

    thread = threading.Thread(target=alternate, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for child in slowed:
            with suppress(psutil.NoSuchProcess):
                child.resume()


@dataclass(frozen=True)
class Completed:
    at: float
    replica: int
    tokens: int


COMPLETED: list[Completed] = []


def watch() -> None:
    """Notes the trajectories that the replicas complete, in `COMPLETED`."""
    put = Feed.put

    def noting(feed: Feed, replica: int, generated: Iterable[Generated]) -> None:
        new, now = list(generated), time.perf_counter()
        COMPLETED.extend(Completed(now, replica, length_of(name)) for _, name in new)
        put(feed, replica, new)

    Feed.put = noting  # type: ignore[method-assign]


@dataclass(frozen=True)
class Round:
    seconds: float
    tokens: tuple[int, int]
    """Of each replica; the second one is slow."""
    ends: tuple[float, float]
    speeds: tuple[float, float]

    @property
    def ideal(self) -> float:
        return sum(self.tokens) / sum(self.speeds)


def staged(driver: Driver) -> Round:
    COMPLETED.clear()
    started = time.perf_counter()
    seconds, _ = parts.generated(driver, STAGE)
    driver.store.close({})
    ensure_weights(driver, "rollout", driver.state.starting["actor"])
    of_replica = [[trajectory for trajectory in COMPLETED if trajectory.replica == number] for number in (0, 1)]
    first, last = started + 0.2 * seconds, started + 0.8 * seconds
    within = [sum(done.tokens for done in trajectories if first <= done.at < last) for trajectories in of_replica]
    return Round(
        seconds=seconds,
        tokens=tuple(sum(done.tokens for done in trajectories) for trajectories in of_replica),
        ends=tuple(max(done.at for done in trajectories) - started for trajectories in of_replica),
        speeds=tuple(tokens / (last - first) for tokens in within),
    )


class Idle:
    """A replica whose trajectories never complete."""

    def __init__(self) -> None:
        self.process, self.drops = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def submit(self, method: Any, *arguments: Any) -> Future[None]:
        assert method is Worker.drop
        return self.drops.submit(lambda: None)

    def call(self, method: Any, *arguments: Any) -> None:
        self.submit(method, *arguments).result()

    def generate(self, *_: object) -> list[Generated]:
        self.process.submit(time.sleep, WAIT_S).result()
        return []


def drop_seconds(count: int) -> float:
    def generate(replica: Any, *_: object) -> list[Generated]:
        time_is_up: list[Generated] = replica.generate()
        return time_is_up

    replicas: Any = [Idle() for _ in range(count)]
    driver = Replicas(replicas, 8, generate)
    keys = [("generate", 0, number) for number in range(2)]
    for key in keys:
        opened: Future[Any] = Future()
        opened.set_result([(f"p{number}",) for number in range(4 * count)])
        driver.open({key: lambda _, opened=opened: opened}, Weights(version=0, digest=""), SimpleQueue())
    while driver.feed.in_flight < 8 * count:
        time.sleep(0.01)
    started = time.perf_counter()
    driver.drop(keys[:1])
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--max-in-flight", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--drop", type=int, nargs="+", default=[], help="only drop a shard, on so many replicas")
    options = parser.parse_args()
    for count in options.drop:
        print(f"{count} replicas: {drop_seconds(count):.2f} s", flush=True)
    if options.drop:
        return
    watch()
    prompts = options.trajectories // SAMPLES
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        parts.model_folder(root / "model", "5M")
        parts.prompt_file(root / "prompts.jsonl", parts.prompt_ids(prompts, PROMPT))
        rollout: dict[str, Any] = {
            "engine": "vllm",
            "n": SAMPLES,
            "max_response_tokens": LONGEST,
            "ignore_eos": True,
            "prompts_per_shard": PROMPTS_PER_SHARD,
        }
        config = parts.run_config(root, "replicas", prompts, {"max_prompt_tokens": PROMPT}, rollout)
        pools = {"train": {"cpus_per_worker": 0.5}, "answers": {"workers": 2, "cpus_per_worker": 0.5}}
        config = config.with_values({"pools": pools, "placement": {"actor": "train", "rollout": "answers"}})
        print(
            "| `max_in_flight` | seconds | ideal | ratio | halves | tokens of fast, slow | speed of fast, slow | "
            "fast, slow end at |\n|---|---|---|---|---|---|---|---|"
        )
        with parts.opened(config) as driver:
            ensure_weights(driver, "rollout", driver.state.starting["actor"])
            staged(driver)  # starts both engines
            slow = driver.groups.of("rollout").replicas()[1]
            with half_as_fast(slow.call(engine_process)):
                for limit in options.max_in_flight:
                    show(driver, limit, options.rounds)


def show(driver: Driver, limit: int, count: int) -> None:
    assert driver.rollout.replicas is not None
    driver.rollout.replicas.close()
    driver.rollout.replicas = None
    driver.config = driver.config.with_values({"rollout.max_in_flight": limit})
    rounds = [staged(driver) for _ in range(count + 1)][1:]
    median = sorted(rounds, key=lambda of_one: of_one.seconds / of_one.ideal)[len(rounds) // 2]
    fast, slow = median.speeds
    halves = sum(median.tokens) / 2 / slow
    print(
        f"| {limit} | {median.seconds:.2f} | {median.ideal:.2f} | {median.seconds / median.ideal:.2f} | {halves:.2f} | "
        f"{median.tokens[0]:,}, {median.tokens[1]:,} | {fast:,.0f}, {slow:,.0f} | "
        f"{median.ends[0]:.2f}, {median.ends[1]:.2f} |",
        flush=True,
    )
    print(f"<!-- ratios: {', '.join(f'{of_one.seconds / of_one.ideal:.2f}' for of_one in rounds)} -->", flush=True)


if __name__ == "__main__":
    main()
