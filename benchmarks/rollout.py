"""Measures tokens per second of the stage generate with each rollout engine, and of vLLM called directly, on the same
requests; and seconds per weight sync.

    OMP_NUM_THREADS=1 python benchmarks/rollout.py [--rounds 3] [--size 5M|20M|1B|4B] [--engines vllm server hf]

A Llama with random weights, float32 (bfloat16 on a GPU); 512 requests in shards of 16 prompts x 4. A prompt has 32
tokens. The lengths of the responses are drawn from a log-normal (mean 128 tokens, cut at 1,024) with a fixed seed, and
end-of-sequence is ignored; temperature 1. The stage is that of a real run: driver, store on disk, worker and engine;
from its start until it is committed. "Directly" is `vllm.LLM.generate` with all 512 requests at once, in a separate
process, with the options with which Ratchet starts vLLM, and with seeds and log-probs. In each round both answer all
requests, one after the other; the first round is warm-up and does not count.

`server` is a `vllm serve` on loopback with the same options. A bare HTTP client, which posts the same requests without
streaming (256 at a time, as the engine), shows the cost of the protocol itself. `hf` gets one shard.

    OMP_NUM_THREADS=1 python benchmarks/rollout.py --seeds [--rounds 5] [--prompts 32]

measures only the cost of a seed per request (`rollout.seeds`): vLLM called directly, with and without seeds in turn,
with responses of 32 tokens; in seconds of the processor, which other processes hardly disturb.

    OMP_NUM_THREADS=1 python benchmarks/rollout.py --host [--rounds 6] [--prompts 64]

measures the cost of a step beside the model, in microseconds of the processor for each running request: vLLM's engine
core (which schedules, and updates its requests), and the work after it, by vLLM's `LLMEngine.step` and by ours in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")

import httpx
import numpy as np

from benchmarks import parts
from ratchet.infra.workers.calls import Context, ShardStart
from ratchet.rlhf import child_processes
from ratchet.rlhf.rollout.server_requests import AT_ONCE
from ratchet.tasks.stage import RowsStage
from ratchet.tasks.stages.generate import GENERATE, GenerateConfig, begin

PROMPTS, SAMPLES, PROMPT, PROMPTS_PER_SHARD = 128, 4, 32, 16
MEAN, LONGEST = 128, 1024
ENGINES = ("vllm", "server", "hf")
STEPS = 32
"""Tokens of each response when seeds are measured."""
ROLLOUT_OF_SEEDS = {
    "engine": {"type": "vllm", "max_model_len": PROMPT + LONGEST, "gpu_memory_utilization": 0.4},
    "n": SAMPLES,
    "max_response_tokens": STEPS,
}


def response_lengths(prompts: int) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(np.log(MEAN) - 0.5, 1.0, prompts * SAMPLES)
    return np.clip(np.round(drawn), 1, LONGEST).astype(int).tolist()  # type: ignore[no-any-return]


def limited(lengths: Sequence[int]) -> RowsStage[Any, Any]:
    """Returns the stage generate with these limits."""

    def begin_limited(context: Context[GenerateConfig]) -> ShardStart:
        start = begin(context)
        first = context.shard * PROMPTS_PER_SHARD * SAMPLES
        for number, dialogue in enumerate(start.dialogues, first):
            dialogue.request = replace(dialogue.request, max_tokens=lengths[number])
        return start

    return replace(GENERATE, begin=begin_limited)


def direct(options: dict[str, Any]) -> None:
    """Calls vLLM directly; answers with the seconds of a round."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(**options["vllm"])
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in options["prompts"] for _ in range(SAMPLES)]
    for question in parts.questions():
        has_seeds, clock = (True, time.perf_counter) if question is None else (question["seeds"], time.process_time)
        started = clock()
        parameters = [
            SamplingParams(
                max_tokens=length,
                ignore_eos=True,
                seed=seed if has_seeds else None,
                logprobs=0,
                detokenize=False,
                skip_special_tokens=False,
            )
            for seed, length in enumerate(options["lengths"])
        ]
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        seconds = clock() - started
        assert [len(output.outputs[0].token_ids) for output in outputs] == options["lengths"]
        parts.answer(seconds)


@contextmanager
def serving(options: dict[str, Any], log: Path) -> Iterator[str]:
    """Yields the URL of a `vllm serve` with these options, in a session of its own, so that all its processes end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # as many as `LLM` has by default; a server has half
    options = {**options, "host": "127.0.0.1", "port": port, "max_num_seqs": 256, "max_num_batched_tokens": 4096}
    flags = [
        f"--{'' if value else 'no-'}{name.replace('_', '-')}"
        if isinstance(value, bool)
        else f"--{name.replace('_', '-')}={value}"
        for name, value in options.items()
        if value is not None and (value is not False or name == "enable_chunked_prefill")
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield url
    finally:
        child_processes.end(process)


def posted(url: str, model: str, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    """Returns the seconds of a bare client that posts all requests, without streaming."""

    async def post_all() -> float:
        slots = asyncio.Semaphore(AT_ONCE)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=AT_ONCE)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:

            async def post(number: int) -> None:
                body = {
                    "model": model,
                    "prompt": prompts[number // SAMPLES],
                    "max_tokens": lengths[number],
                    "seed": number,
                    "logprobs": 0,
                    "return_token_ids": True,
                    "ignore_eos": True,
                    "skip_special_tokens": False,
                }
                async with slots:
                    received = (await client.post(f"{url}/v1/completions", json=body)).raise_for_status().json()
                assert len(received["choices"][0]["token_ids"]) == lengths[number]

            started = time.perf_counter()
            await asyncio.gather(*map(post, range(len(lengths))))
            return time.perf_counter() - started

    return asyncio.run(post_all())


def measure(engine: str, root: Path, options: argparse.Namespace) -> None:
    prompts = PROMPTS_PER_SHARD if engine == "hf" else options.prompts
    lengths, texts = response_lengths(prompts), parts.prompt_ids(prompts, PROMPT)
    parts.prompt_file(root / "prompts.jsonl", texts)
    rollout: dict[str, Any] = {
        "engine": {"type": "vllm", "max_model_len": PROMPT + LONGEST, "gpu_memory_utilization": 0.4},
        "n": SAMPLES,
        "max_response_tokens": LONGEST,
        "ignore_eos": True,
        "prompts_per_shard": PROMPTS_PER_SHARD,
    }
    data = {"max_prompt_tokens": PROMPT}
    config = parts.run_config(root, engine, prompts, data, rollout)
    vllm = parts.vllm_options(config)
    if engine == "hf":
        config = config.with_values({"rollout.engine": "hf"})
    seconds: dict[str, list[float]] = defaultdict(list)
    syncs = list[float]()

    @contextmanager
    def served() -> Iterator[str | None]:
        if engine != "server":
            yield None
            return
        with serving(vllm, root / "server.log") as url:
            yield url

    with parts.Direct(__file__, vllm=vllm, prompts=texts, lengths=lengths) as bare, served() as url:
        if url is not None:
            server = {"type": "server", "urls": [url], "weights_folder": str(root / "weights")}
            config = config.with_values({"rollout.engine": server})
        with parts.opened(config) as driver:
            for _ in range(options.rounds + 1):
                syncs.append(parts.synced(driver))
                seconds["vLLM directly"].append(bare.ask())
                taken, manifest = parts.generated(driver, limited(lengths))
                assert manifest.metrics["perf/generated_tokens"] == sum(lengths)
                seconds[engine].append(taken)
                if url is not None:
                    seconds["a bare client of the server"].append(posted(url, vllm["model"], texts, lengths))
                driver.store.close({})  # the iteration has learnt nothing, and still the next one has new weights
    medians = {name: statistics.median(rounds[1:]) for name, rounds in seconds.items()}
    for name, median in medians.items():
        of = "" if name == engine or name.startswith("vLLM") else f" ({engine})"
        rounds = ", ".join(f"{value:.2f}" for value in seconds[name][1:])
        ratio = medians["vLLM directly"] / median
        print(f"| {name}{of} | {sum(lengths) / median:,.0f} | {ratio:.2f} | {rounds} |", flush=True)
    print(f"| weight sync ({engine}) | | | {statistics.median(syncs[1:]):.3f} |", flush=True)


def measure_seeds(root: Path, options: argparse.Namespace) -> None:
    config = parts.run_config(root, "vllm", options.prompts, {"max_prompt_tokens": PROMPT}, ROLLOUT_OF_SEEDS)
    texts, lengths = parts.prompt_ids(options.prompts, PROMPT), [STEPS] * (options.prompts * SAMPLES)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with parts.Direct(__file__, vllm=parts.vllm_options(config), prompts=texts, lengths=lengths) as bare:
        for number in range(options.rounds + 1):
            # the order alternates, so that drift of the machine affects both alike
            for seeds in (True, False) if number % 2 else (False, True):
                seconds[seeds].append(bare.ask({"seeds": seeds}))
    print("| seeds | processor seconds, median | of each round |\n|---|---|---|")
    medians = {seeds: statistics.median(rounds[1:]) for seeds, rounds in seconds.items()}
    for seeds, median in medians.items():
        rounds = ", ".join(f"{value:.2f}" for value in seconds[seeds][1:])
        print(f"| {'trajectory' if seeds else 'engine'} | {median:.2f} | {rounds} |")
    per_step = 1000 * (medians[True] - medians[False]) / STEPS / (len(lengths) / 100)
    print(f"\nratio {medians[True] / medians[False]:.3f}; {per_step:.2f} ms per step and 100 requests")


def measure_host(root: Path, options: argparse.Namespace) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from ratchet.rlhf.rollout.vllm_process import FLUSH_S, VLLM

    config = parts.run_config(root, "vllm", options.prompts, {"max_prompt_tokens": PROMPT}, ROLLOUT_OF_SEEDS)
    engine = VLLM(parts.vllm_options(config))
    core, spent = engine.llm.llm_engine.engine_core, defaultdict[str, float](float)

    def timed(owner: Any, name: str, part: str) -> None:
        call = getattr(owner, name)

        def timed_call(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                spent[part] += time.thread_time() - began

        setattr(owner, name, timed_call)

    timed(core, "get_output", "core")
    for name in ("execute_model", "sample_tokens"):
        timed(core.engine_core.model_executor, name, "model")
    texts = [ids for ids in parts.prompt_ids(options.prompts, PROMPT) for _ in range(SAMPLES)]
    lengths = np.random.default_rng(0).integers(16, 112, len(texts)).tolist()
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for number in range(options.rounds + 1):
        for loop in ("vLLM's", "ours") if number % 2 else ("ours", "vLLM's"):
            spent.clear()
            for row, (ids, length) in enumerate(zip(texts, lengths, strict=True)):
                parameters = {"max_tokens": length, "logprobs": 0, "ignore_eos": True, "detokenize": False, "stop": []}
                engine.submit((row, ids, parameters, None))
            flushed = time.monotonic()
            while engine.is_busy:
                began = time.thread_time()
                if loop == "ours":
                    engine.step()
                    if time.monotonic() - flushed > FLUSH_S:
                        engine.new_tokens()
                        flushed = time.monotonic()
                else:
                    engine.llm.llm_engine.step()
                spent["all"] += time.thread_time() - began
            engine.cancel(list(range(len(texts))))
            micro = 1e6 / sum(lengths)
            found[loop].append((micro * (spent["core"] - spent["model"]), micro * (spent["all"] - spent["core"])))
    print("| loop | engine core without the model, µs | after it, µs | of each round |\n|---|---|---|---|")
    for loop, rounds in found.items():
        inside, after = (statistics.median(one[place] for one in rounds[1:]) for place in (0, 1))
        print(f"| {loop} | {inside:.1f} | {after:.1f} | {', '.join(f'{one[1]:.1f}' for one in rounds[1:])} |")
    ratios = [theirs[1] / own[1] for theirs, own in zip(found["vLLM's"][1:], found["ours"][1:], strict=True)]
    print(f"\nratio within a round: {statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", choices=parts.SIZES, default="5M")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--seeds", action="store_true")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--direct", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.direct:
        return direct(json.loads(options.direct))
    with tempfile.TemporaryDirectory() as folder:
        parts.model_folder(Path(folder) / "model", options.size)
        if options.host:
            return measure_host(Path(folder), options)
        if options.seeds:
            return measure_seeds(Path(folder), options)
        lengths = response_lengths(options.prompts)
        print(f"{len(lengths)} responses, {sum(lengths)} tokens, the longest {max(lengths)}\n")
        print("| | tokens/s | relative to vLLM directly | seconds of each round |\n|---|---|---|---|", flush=True)
        for engine in options.engines:
            measure(engine, Path(folder), options)


if __name__ == "__main__":
    main()
