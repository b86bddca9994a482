"""Measures tokens per second through the endpoint that agents call, against the same engine called directly.

    OMP_NUM_THREADS=1 python benchmarks/gateway.py [--rounds 5] [--calls 256] [--size 20M]

vLLM with a Llama of random weights, float32; 64 calls at a time. A prompt has 32 tokens, and an answer has 16 to 96,
drawn with a fixed seed; end-of-sequence is ignored. "Directly" streams the same token prompts from the engine. "Through
the gateway" 64 programs make the same number of calls with httpx over HTTP on loopback, and every answer is stored on
disk before its program gets it. Both run in this process, in turn, each round; the first round is warm-up and does not
count. The ratio is of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import httpx
import numpy as np
from transformers import AutoTokenizer

from benchmarks import parts
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.call_log import CallLog
from ratchet.rlhf import event_loop
from ratchet.rlhf.agents.agent_loop import Generator, Rules
from ratchet.rlhf.agents.conversations import Completion
from ratchet.rlhf.agents.gateway import Gateway
from ratchet.rlhf.agents.programs import AgentCalls
from ratchet.rlhf.environments.dialogues import Beginning, Dialogue
from ratchet.rlhf.rollout.engine import Request, Sampling
from ratchet.rlhf.rollout.vllm_engine import VLLMRollout

AT_ONCE, PROMPT, SHORTEST, LONGEST = 64, 32, 16, 96


def directly(engine: VLLMRollout, prompts: list[list[int]], lengths: list[int], sampling: Sampling) -> float:
    async def answered() -> None:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            request = Request(f"direct-{number}", tuple(prompts[number]), max_tokens=lengths[number])
            async with slots, aclosing(engine.stream(request, sampling)) as chunks:
                async for _ in chunks:
                    pass

        await asyncio.gather(*map(one, range(len(prompts))))

    started = time.perf_counter()
    event_loop.run(answered())
    return time.perf_counter() - started


def through(
    generator: Generator, gateway: Gateway, store: RunStore, prompts: list[list[int]], lengths: list[int], sampling: Any
) -> float:
    http = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=AT_ONCE))
    numbers = iter(range(len(prompts)))

    async def program(task: Any, base_url: str, api_key: str, model: str) -> float:
        for number in numbers:  # the next request, whoever is free
            body = {"model": model, "prompt": prompts[number], "max_tokens": lengths[number]}
            headers = {"Authorization": f"Bearer {api_key}"}
            answer = await http.post(f"{base_url}/completions", json=body, headers=headers)
            assert answer.json()["usage"]["completion_tokens"] == lengths[number]
        return 1.0

    agents = AgentCalls(
        program,
        {},
        gateway=gateway,
        context=PROMPT + LONGEST,
        max_calls=len(prompts),
        timeout_s=600.0,
        on_error="fail",
        must_reward=True,
    )
    recorder = CallLog(lambda table: store.write_calls(0, "generate", 1, table))
    rules = Rules(sampling, agents=agents, recorder=recorder)
    beginning = Beginning([{"role": "user", "content": "go"}], None, False, "{}")
    dialogues = [Dialogue(Request(f"it0-p0-s{number:02d}", ()), beginning) for number in range(AT_ONCE)]
    started = time.perf_counter()
    generator.submit([(dialogue, rules) for dialogue in dialogues])
    left = len(dialogues)
    while left:
        left -= len(generator.wait(1.0))
    seconds = time.perf_counter() - started
    assert all(dialogue.error is None for dialogue in dialogues)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=256)
    parser.add_argument("--size", default="20M")
    arguments = parser.parse_args()
    lengths = np.random.default_rng(0).integers(SHORTEST, LONGEST + 1, arguments.calls).tolist()
    with tempfile.TemporaryDirectory() as folder:
        parts.model_folder(Path(folder), arguments.size)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        engine = VLLMRollout(folder, eos_token_ids=(1,), max_model_len=PROMPT + LONGEST, gpu_memory_utilization=0.4)
        sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=LONGEST, seed=0, ignore_eos=True)
        generator, gateway = Generator(engine, tokenizer, interruptible=False), Gateway("127.0.0.1")
        generator.resume(0, engine)
        store = RunStore.at(f"file://{folder}/run")
        taken: dict[str, list[float]] = {"directly": [], "through the gateway": []}
        for round_number in range(arguments.rounds + 1):
            ids = parts.prompt_ids(arguments.calls * (round_number + 1), PROMPT)[-arguments.calls :]
            prompts = [Completion(prompt).ids(tokenizer) for prompt in ids]
            seconds = {
                "directly": directly(engine, prompts, lengths, replace(sampling, seed=round_number)),
                "through the gateway": through(generator, gateway, store, prompts, lengths, sampling),
            }
            for name, value in seconds.items():
                print(f"round {round_number} {name}: {sum(lengths) / value:.0f} tokens/s", flush=True)
                if round_number:
                    taken[name].append(sum(lengths) / value)
        medians = {name: statistics.median(values) for name, values in taken.items()}
        print({name: round(value) for name, value in medians.items()})
        print(f"ratio {medians['through the gateway'] / medians['directly']:.3f}")
        engine.close()


if __name__ == "__main__":
    main()
