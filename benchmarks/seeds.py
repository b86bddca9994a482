"""Counts how often `ratchet compare` finds no difference between runs that differ only in their seed.

    OMP_NUM_THREADS=1 python benchmarks/seeds.py --runs 21

Trains a tiny model, once per seed, on a task that it learns within the run: to begin its answer with one of a quarter
of its characters. The runs draw other prompts and other answers. Each is compared with all others. If the script is
stopped, the same command continues.
"""

from __future__ import annotations

import argparse
import os
from itertools import combinations
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from ratchet.flows.train import train
from ratchet.infra.execution.claims import run_url
from ratchet.infra.runs.comparison import compare, verdict_of
from ratchet.infra.runs.run import open_run
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.data.countdown_dataset import problems, rows
from tests import tiny


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--every", type=int, default=2, help="iterations between validations")
    parser.add_argument("--prompts", type=int, default=512, help="held-out prompts")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--store", default=f"file://{Path.cwd()}/runs/seeds")
    options = parser.parse_args()
    folder, console = Path(options.store.removeprefix("file://")), Console()
    if not (folder / "held_out.parquet").exists():
        tiny.model_folder(folder / "model")
        tiny.prompt_file(folder / "prompts.parquet", 256)
        pq.write_table(
            rows(problems(seed=8, count=options.prompts, high=9)),
            folder / "held_out.parquet",
        )
    for seed in range(options.runs):
        train(config_of(folder, seed, options))
    runs = [open_run(run_url(options.store, f"seed-{seed}")) for seed in range(options.runs)]
    pairs = {(a, b): compare(runs[a], runs[b]) for a, b in combinations(range(options.runs), 2)}
    table = Table("pairs", "no difference", "with the noise of prompts alone", "half the width of the interval, median")
    for name, chosen in (
        ("each run and the next", [(a, b) for a, b in pairs if b == a + 1]),
        ("all pairs", list(pairs)),
    ):
        results = [pairs[pair] for pair in chosen]
        alone = [result.differences[-1] for result in results]
        table.add_row(
            f"{name}: {len(results)}",
            str(sum(result.verdict == "no difference" for result in results)),
            str(sum(verdict_of(entry.low, entry.high, 1.0) == "no difference" for entry in alone)),
            f"{np.median([(result.high - result.low) / 2 for result in results]):.3f}",
        )
    console.print(table)
    scores = [run.validation(columns=["score"]).groupby("iteration")["score"].mean() for run in runs]
    for name, curve in (("mean", np.mean(scores, axis=0)), ("spread", np.std(scores, axis=0, ddof=1))):
        console.print(f"{name} of the runs' scores, validation by validation: {', '.join(f'{x:.3f}' for x in curve)}")


def config_of(folder: Path, seed: int, options: argparse.Namespace) -> RunConfig:
    return tiny.config(
        folder,
        run={"name": f"seed-{seed}", "seed": seed, "store": options.store},
        reward__function="tests.rewards:mostly_flat",
        data__prompts_per_iteration=16,
        rollout={"n": 4, "max_response_tokens": 4, "prompts_per_shard": 64},
        algorithm__advantage="grpo",
        algorithm__kl={},
        actor={"lr": options.lr, "mini_batch_trajectories": 64, "micro_batch_tokens": 8192},
        validation={"data": str(folder / "held_out.parquet"), "every": options.every, "solved_score": 1.0},
        checkpoint__every=100,
        train__iterations=options.iterations,
    )


if __name__ == "__main__":
    main()
