"""Measures a stage whose trajectories talk to environments of very different speed, against an ideal schedule.

    OMP_NUM_THREADS=1 python benchmarks/dialogues.py [--rounds 3] [--trajectories 128]

128 trajectories in shards of 64, with 4 to 12 turns of 8 tokens; 32 prompt tokens; a Llama with 5 M parameters, random
weights, float32; vLLM on the CPU. An environment sleeps before it answers with 4 tokens: an exponential time with mean
50 ms, and one call in fifty 2 s. Turns and times are drawn with a fixed seed. The stage is that of a real run: driver,
store on disk, worker and engine; from its start until it is committed.

"Ideal" is computed from the same drawn times: a dialogue waits only for its own turns and its own environment. Its
turns share the engine. A step of the engine gives a token to every running dialogue and takes
a + b * running + c * joining seconds ("joining": turns whose prompt is computed in this step). The three constants are
fitted to the steps of the bare loop. "Bare loop" is one process that calls `LLMEngine.step` and starts a dialogue's
next turn as soon as its time is over, without threads, and without Ratchet. "Lockstep" is computed with the same
constants: shard after shard, and within a shard every turn waits for the slowest trajectory. In each round the bare
loop and the stage run one after the other; the first round is warm-up and does not count.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")

import numpy as np

from benchmarks import parts
from ratchet.rlhf.environments.environment import Observation
from ratchet.rlhf.rollout.engine import Chunk, Request, RolloutEngine, Sampling

TRAJECTORIES, PER_SHARD, PROMPT = 128, 64, 32
FEWEST, MOST, TURN = 4, 12, 8
MEAN_S, LONG_S, LONG_SHARE = 0.05, 2.0, 0.02
HEARD = [10, 11, 12, 13]


def waits_of(number: int) -> list[float]:
    """Returns the seconds for which the environment of a trajectory sleeps after each turn."""
    random = np.random.default_rng([0, number])
    turns = int(random.integers(FEWEST, MOST + 1))
    waits = random.exponential(MEAN_S, turns)
    waits[random.random(turns) < LONG_SHARE] = LONG_S
    return waits.tolist()  # type: ignore[no-any-return]


class Slow:
    """An environment that sleeps before it answers."""

    stop: tuple[str, ...] = ()

    def reset(self, messages: Any, ground_truth: Any, extra_info: Any) -> None:
        self.waits = deque(waits_of(extra_info["number"]))

    def step(self, turn: str) -> Observation:
        time.sleep(self.waits.popleft())
        return Observation(" ".join(f"t{token}" for token in HEARD) if self.waits else None)


def speak_briefly(engine: RolloutEngine) -> None:
    """Makes each turn of the policy end after `TURN` tokens."""
    whole = engine.stream

    async def stream(request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        brief = replace(request, max_tokens=TURN)
        async with aclosing(whole(brief, replace(sampling, ignore_eos=True))) as chunks:
            async for chunk in chunks:
                yield chunk if chunk.finish_reason is None else replace(chunk, finish_reason="stop")

    engine.stream = stream  # type: ignore[method-assign]


class Step(NamedTuple):
    running: int
    joining: int
    seconds: float


def direct(options: dict[str, Any]) -> None:
    """Runs the bare loop; answers with the seconds of a round, and the engine's steps."""
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(**options["vllm"]).llm_engine
    requests = 0
    for _ in parts.questions():
        waits = [deque(waits_of(number)) for number in range(len(options["prompts"]))]
        ids = [list(prompt) for prompt in options["prompts"]]
        running: dict[str, int] = {}
        ready = [(0.0, number) for number in range(len(ids))]
        left, steps, started = len(ids), list[Step](), time.perf_counter()
        while left:
            joining = 0
            while ready and ready[0][0] <= time.perf_counter() - started:
                _, number = heapq.heappop(ready)
                if not waits[number]:
                    left -= 1
                    continue
                requests, joining = requests + 1, joining + 1
                running[str(requests)] = number
                parameters = SamplingParams(
                    max_tokens=TURN,
                    ignore_eos=True,
                    seed=requests,
                    logprobs=0,
                    detokenize=False,
                    skip_special_tokens=False,
                )
                engine.add_request(str(requests), TokensPrompt(prompt_token_ids=ids[number]), parameters)
            if not running:
                if ready:
                    time.sleep(max(ready[0][0] - (time.perf_counter() - started), 0))
                continue
            count, before = len(running), time.perf_counter()
            outputs = engine.step()
            ended = time.perf_counter()
            steps.append(Step(count, joining, ended - before))
            for output in outputs:
                if output.finished:
                    number = running.pop(output.request_id)
                    ids[number] += [*output.outputs[0].token_ids, *HEARD]
                    heapq.heappush(ready, (ended - started + waits[number].popleft(), number))
        parts.answer({"seconds": time.perf_counter() - started, "steps": steps})


class Costs(NamedTuple):
    fixed: float
    running: float
    joining: float

    @classmethod
    def fitted(cls, steps: Sequence[Step]) -> Costs:
        rows = np.array([(1.0, step.running, step.joining) for step in steps])
        seconds = np.array([step.seconds for step in steps])
        return cls(*map(float, np.linalg.lstsq(rows, seconds, rcond=None)[0]))

    def of(self, running: int, joining: int) -> float:
        return self.fixed + self.running * running + self.joining * joining

    def turn(self, together: int) -> float:
        """Returns the seconds of a turn of dialogues that start it together."""
        return self.of(together, together) + (TURN - 1) * self.of(together, 0)


def ideal(plan: Sequence[Sequence[float]], costs: Costs) -> tuple[float, float]:
    """Returns the seconds of the ideal schedule, and those in which its engine is busy."""
    waits = [deque(of_one) for of_one in plan]
    ready = [(0.0, number) for number in range(len(plan))]
    left: dict[int, int] = {}
    now = busy = 0.0
    while ready or left:
        if not left:
            now = max(now, ready[0][0])
        joining = 0
        while ready and ready[0][0] <= now:
            _, number = heapq.heappop(ready)
            if waits[number]:
                left[number], joining = TURN, joining + 1
        if not left:
            continue
        seconds = costs.of(len(left), joining)
        now, busy = now + seconds, busy + seconds
        for number in list(left):
            left[number] -= 1
            if not left[number]:
                del left[number]
                heapq.heappush(ready, (now + waits[number].popleft(), number))
    return now, busy


def lockstep(plan: Sequence[Sequence[float]], costs: Costs) -> float:
    """Returns the seconds if every turn waits for the slowest trajectory of its shard."""
    seconds = 0.0
    for first in range(0, len(plan), PER_SHARD):
        shard = plan[first : first + PER_SHARD]
        for turn in range(max(map(len, shard))):
            waits = [of_one[turn] for of_one in shard if turn < len(of_one)]
            seconds += costs.turn(len(waits)) + max(waits)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trajectories", type=int, default=TRAJECTORIES)
    parser.add_argument("--direct", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.direct:
        return direct(json.loads(options.direct))
    plan = [waits_of(number) for number in range(options.trajectories)]
    prompts = parts.prompt_ids(options.trajectories, PROMPT)
    staged, bare, steps = list[float](), list[float](), list[Step]()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        parts.model_folder(root / "model", "5M")
        parts.prompt_file(root / "prompts.jsonl", prompts)
        rollout = {
            "engine": {"type": "vllm", "gpu_memory_utilization": 0.4},
            "n": 1,
            "max_response_tokens": MOST * (TURN + len(HEARD)) + 1,
            "prompts_per_shard": PER_SHARD,
            "environment": {"name": "benchmarks.dialogues:Slow", "max_turns": MOST, "on_error": "fail"},
        }
        config = parts.run_config(root, "dialogues", options.trajectories, {"max_prompt_tokens": PROMPT}, rollout)
        vllm = parts.vllm_options(config)
        with parts.Direct(__file__, vllm=vllm, prompts=prompts) as loop, parts.opened(config) as driver:
            for number in range(options.rounds + 1):
                parts.synced(driver)
                if not number:
                    speak_briefly(driver.groups.local.worker.engines.rollout())
                measured = loop.ask()
                seconds, manifest = parts.generated(driver)
                assert manifest.metrics["perf/generated_tokens"] == TURN * sum(map(len, plan))
                driver.store.close({})
                if number:
                    bare.append(measured["seconds"])
                    steps += [Step(*step) for step in measured["steps"]]
                    staged.append(seconds)
    costs = Costs.fitted(steps)
    best, busy = ideal(plan, costs)
    alone = max(sum(waits) + len(waits) * costs.turn(1) for waits in plan)
    rows = {
        "the stage generate": statistics.median(staged),
        "ideal": best,
        "bare loop": statistics.median(bare),
        "lockstep": lockstep(plan, costs),
        "the engine is busy, in the ideal schedule": busy,
        "the longest dialogue, alone on the engine": alone,
    }
    calls = [wait for waits in plan for wait in waits]
    print(
        f"{len(plan)} dialogues, {len(calls)} turns; environments sleep {sum(calls):.1f} s in sum, at most "
        f"{max(map(sum, plan)):.1f} s in one dialogue; a step takes {1e3 * costs.fixed:.2f} + {1e3 * costs.running:.3f}"
        f" * running + {1e3 * costs.joining:.3f} * joining ms\n"
    )
    print("| | seconds | relative to ideal |\n|---|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value:.2f} | {value / best:.2f} |")
    for name, rounds in {"the stage": staged, "the bare loop": bare}.items():
        print(f"rounds of {name}: {', '.join(f'{value:.2f}' for value in rounds)}")


if __name__ == "__main__":
    main()
