"""Counts how often `ratchet compare` finds a difference between runs that differ only in their seed.

    OMP_NUM_THREADS=1 python benchmarks/seeds.py --runs 21

Trains a tiny model, once per seed, on a task that it learns within the run: to begin its answer with one of a quarter
of its characters. The runs draw other prompts and other answers. Each policy is compared with all others, and so are
settings that are in truth one: three runs, and the next three. If the script is stopped, the same command continues.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
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
from ratchet.infra.runs.comparison import Comparison, compare
from ratchet.infra.runs.run import open_run
from ratchet.infra.runs.settings_comparison import SettingsComparison, compare_settings
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.data.countdown_dataset import problems, rows
from tests import tiny

SIDE = 3
"""Runs of a side, when settings are compared."""


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
    table = Table("compared", "how many", "a difference is found", "half the width of the interval, median")
    pairs: Sequence[Comparison | SettingsComparison] = [compare(a, b) for a, b in combinations(runs, 2)]
    places = range(0, len(runs) - 2 * SIDE + 1, SIDE)
    sides = [compare_settings(runs[at : at + SIDE], runs[at + SIDE : at + 2 * SIDE]) for at in places]
    for name, results in (("policies", pairs), (f"settings, {SIDE} runs a side", sides)):
        known = [(result.low, result.high) for result in results if result.low is not None and result.high is not None]
        table.add_row(
            name,
            str(len(results)),
            str(sum(result.verdict in ("B is better", "B is worse") for result in results)),
            f"{np.median([(high - low) / 2 for low, high in known]):.3f}",
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
