"""Measures the cost of a crash in the middle of long responses, and of the journal against it.

    OMP_NUM_THREADS=1 python benchmarks/journal.py [--kills 20] [--journal-s 2] [--size 5M]

256 responses of 512 tokens (64 prompts of 32 tokens x 4, in shards of 16 prompts; end-of-sequence ignored), which a
`vllm serve` on loopback generates for the stage generate of a real run. The driver's process is killed (SIGKILL) at
random, 20 times, between 1 and 6 seconds after its first token, and then left alone until the stage is committed. The
server counts its tokens. "Twice" are those that it generated and that the log did not have when the next driver began;
in seconds, they are divided by the speed of that driver's generation. A token may be lost for `journal_s`, for as long
as a journal takes to be written, and in the server's stream, which sends 16 tokens at a time.

The second table is the cost of one journal of so many tokens: how long it keeps the event loop from delivering tokens,
and how long it takes in all, in a thread of the worker.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")

import httpx
import pyarrow as pa

from benchmarks import parts
from benchmarks.rollout import serving
from ratchet.infra.runs.run import Run, open_run
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.call_log import JOURNAL
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.environments.dialogues import Dialogue
from ratchet.rlhf.rollout.engine import Chunk, Request

PROMPTS, SAMPLES, PROMPT, LENGTH, PROMPTS_PER_SHARD = 64, 4, 32, 512, 16
SOONEST_S, LATEST_S = 1.0, 6.0


def counted(url: str) -> int:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total{")))


def counted_when_idle(url: str) -> int:
    """Returns the number of tokens that a server has generated, once it has noticed that its client is dead."""
    while True:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        active = [
            line for line in lines if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
        ]
        if not sum(float(line.split()[-1]) for line in active):
            return counted(url)
        time.sleep(0.05)


def durable(run: Run) -> tuple[int, int]:
    """Returns the numbers of durable tokens and responses of the open iteration: those in shards and journals."""
    store, lengths = run.store, dict[str, int]()
    for shard in store.state.shards.get("generate", {}).values():
        for row in store.read_shard(shard.data, ("trajectory_id", "response_ids")).to_pylist():
            lengths[row["trajectory_id"]] = len(row["response_ids"])
    journal = store.state.journals.get("generate")
    for part in () if journal is None else journal.parts:
        for row in store.read_shard(part).to_pylist():
            lengths.setdefault(row["trajectory_id"], len(row["ids"]))
    return sum(lengths.values()), len(lengths)


def drive(config: RunConfig) -> None:
    with parts.opened(config) as driver:
        parts.synced(driver)
        print("ready", flush=True)
        parts.generated(driver)


def kills(root: Path, options: argparse.Namespace) -> None:
    parts.model_folder(root / "model", options.size)
    parts.prompt_file(root / "prompts.jsonl", parts.prompt_ids(PROMPTS, PROMPT))
    rollout = {
        "engine": {"type": "vllm", "max_model_len": PROMPT + LENGTH, "gpu_memory_utilization": 0.4},
        "n": SAMPLES,
        "max_response_tokens": LENGTH,
        "ignore_eos": True,
        "prompts_per_shard": PROMPTS_PER_SHARD,
        "journal_s": options.journal_s,
    }
    config = parts.run_config(root, "journal", PROMPTS, {"max_prompt_tokens": PROMPT}, rollout)
    vllm = parts.vllm_options(config)
    draw, before, total = random.Random(0), 0, PROMPTS * SAMPLES * LENGTH
    lost_s, twice_in_all = list[float](), 0
    print(
        "| kill | tokens generated | tokens per second | twice | in seconds | durable, of responses |\n"
        "|---|---|---|---|---|---|"
    )
    with serving(vllm | {"disable_log_stats": False}, root / "server.log") as url:  # they count its tokens
        config = config.with_values(
            {"rollout.engine": {"type": "server", "urls": [url], "weights_folder": str(root / "weights")}}
        )
        path, log = root / "config.json", root / "driver.log"
        path.write_text(config.model_dump_json())
        for kill in range(options.kills + 1):
            with log.open("wb") as errors:
                command = [sys.executable, __file__, "--drive", str(path)]
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
            assert process.stdout is not None
            while (line := process.stdout.readline()) != b"ready\n":
                assert line, log.read_text()[-2000:]
            begun = counted(url)
            while counted(url) == begun and process.poll() is None:
                time.sleep(0.02)
            started = time.perf_counter()
            if kill == options.kills:
                assert process.wait() == 0
            else:
                time.sleep(draw.uniform(SOONEST_S, LATEST_S))
                assert process.poll() is None, f"the driver ended before it was killed: {log.read_text()[-2000:]}"
                process.kill()
                process.wait()
            seconds = time.perf_counter() - started
            generated = counted_when_idle(url) - begun
            now, responses = durable(open_run(f"{config.run.store}/journal"))
            twice = before + generated - now
            if kill < options.kills:
                lost_s.append(twice * seconds / generated)
                twice_in_all += twice
            name, speed = "none" if kill == options.kills else str(kill + 1), generated / seconds
            print(
                f"| {name} | {generated:,} | {speed:,.0f} | {twice:,} | {twice / speed:.2f} | {now:,} of {responses} |",
                flush=True,
            )
            before = now
    assert before == total, f"{before} of {total} tokens are committed"
    print(
        f"\n{twice_in_all:,} of {total:,} tokens were generated twice: {statistics.mean(lost_s):.2f} s per kill, "
        f"at most {max(lost_s):.2f} s (journal_s {options.journal_s:g}); each response is committed once, whole\n"
    )


def costs(root: Path) -> None:
    store = RunStore(ObjectStore(f"file://{root}/costs"))
    print("| trajectories x tokens | event loop | in all | MB |\n|---|---|---|---|")
    for count, tokens in ((256, 512), (256, 4096), (512, 4096)):
        dialogues = [Dialogue(Request(f"it000000-p{number:05d}-s00", (1,))) for number in range(count)]
        draw = random.Random(0)
        for dialogue in dialogues:
            dialogue.turn_starts = [0]
            ids = tuple(draw.randrange(32_000) for _ in range(tokens))
            dialogue.wrote(Chunk(ids, tuple(-draw.random() for _ in range(tokens))), 7)
        started = time.perf_counter()
        copies = [dialogue.copy() for dialogue in dialogues]
        copied = time.perf_counter()
        rows = [dialogue.journaled() for dialogue in copies]
        part = store.write_journal(0, "generate", tokens, pa.Table.from_pylist(rows, JOURNAL))
        ended = time.perf_counter()
        print(
            f"| {count} x {tokens:,} | {1e3 * (copied - started):.0f} ms | {1e3 * (ended - started):.0f} ms | "
            f"{part.bytes / 1e6:.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--journal-s", type=float, default=2.0)
    parser.add_argument("--size", choices=parts.SIZES, default="5M")
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        return drive(RunConfig.model_validate(json.loads(options.drive.read_text())))
    with tempfile.TemporaryDirectory() as folder:
        costs(Path(folder))
        if options.kills:
            print()
            kills(Path(folder), options)


if __name__ == "__main__":
    main()
