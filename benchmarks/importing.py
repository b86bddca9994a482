"""Measures `ratchet import` of JSON lines: time, CPU time and peak memory by the number of steps.

OMP_NUM_THREADS=1 python benchmarks/importing.py [--steps 100 300 1000] [--rows 512] [--tokens 0 300]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import tempfile
import time
from pathlib import Path

from ratchet.infra.observe.importing import import_run
from ratchet.infra.observe.sources.jsonl import JSONLines

WORDS = 4096
"""Different words in the texts."""


def lines(rows: int, tokens: int) -> list[str]:
    """Returns the rows of a step, without its number: prompts of 200 characters in groups of 8, responses of 600."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 8))) for _ in range(WORDS)]

    def text(size: int) -> str:
        return " ".join(chance.choices(words, k=size // 5))[:size]

    made, prompt = [], ""
    for row in range(rows):
        prompt = text(200) if row % 8 == 0 else prompt
        fields = {"prompt": prompt, "response": text(600), "score": chance.random(), "advantages": chance.gauss(0, 1)}
        if tokens:
            fields["response_ids"] = [chance.randrange(150_000) for _ in range(tokens)]
            fields["rollout_log_probs"] = [round(-chance.expovariate(2), 6) for _ in range(tokens)]
        made.append(json.dumps(fields)[1:])
    return made


def write(file: Path, steps: int, rows: list[str]) -> None:
    with file.open("w") as opened:
        for step in range(steps):
            opened.writelines(f'{{"iteration": {step}, {row}\n' for row in rows)


def measured(file: Path, folder: Path) -> tuple[float, float, float]:
    """Imports a file in a process of its own; returns seconds, CPU-seconds and the peak of its memory in MiB."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        import_run(JSONLines(file, {}), "run", f"file://{folder}")
        os._exit(0)
    _, status, used = os.wait4(child, 0)
    assert status == 0, "the import failed"
    return time.monotonic() - started, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs="+", default=[0, 300])
    arguments = parser.parse_args()
    print("| tokens | steps | file, GB | s | CPU-s | ms of CPU per step | peak, MiB |\n|---|---|---|---|---|---|---|")
    for tokens in arguments.tokens:
        rows = lines(arguments.rows, tokens)
        for steps in arguments.steps:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "rollouts.jsonl"
                write(file, steps, rows)
                size = file.stat().st_size / 1e9
                seconds, cpu, peak = measured(file, Path(folder) / "runs")
            each = 1e3 * cpu / steps
            print(
                f"| {tokens} | {steps} | {size:.2f} | {seconds:.0f} | {cpu:.0f} | {each:.0f} | {peak:.0f} |", flush=True
            )
    print(f"before the first import: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
