"""Measures held-out solve rates on Countdown after the same number of generated tokens, for several recipes and seeds.

    ratchet demo countdown                       # once: the data and the supervised model
    OMP_NUM_THREADS=1 python benchmarks/algorithms.py ppo grpo rloo dapo --tokens 240000 --seeds 0 1 2

Each recipe is trained one iteration at a time (a finished run continues when `train.iterations` is raised) until it has
generated this many tokens, including those of prompts that dynamic sampling drops. Then its newest snapshot answers the
1 024 held-out prompts at temperature 1. The learning rate is constant, so that no recipe profits from a schedule made
for another length. If the script is stopped, the same command continues.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")

import numpy as np
from rich.console import Console
from rich.table import Table

from ratchet.flows.commands.models import evaluation_config
from ratchet.flows.evaluate import evaluate
from ratchet.flows.train import train
from ratchet.infra.execution.claims import run_url
from ratchet.infra.runs.run import open_run
from ratchet.rlhf.config import RunConfig, load_config
from ratchet.rlhf.errors import UserError

EXAMPLES = Path(__file__).parents[1] / "examples"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["ppo", "grpo", "rloo", "dapo"])
    parser.add_argument("--tokens", type=int, default=240_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--store", default="file://./runs/algorithms")
    options = parser.parse_args()
    console = Console()
    table = Table("recipe", "solved: mean of the seeds", "each seed", "iterations", "tokens generated")
    for recipe in options.recipes:
        results = [measure(recipe, seed, options.tokens, options.store, console) for seed in options.seeds]
        rates = [rate for rate, _, _ in results]
        table.add_row(
            recipe,
            f"{np.mean(rates):.1%}",
            ", ".join(f"{rate:.1%}" for rate in rates),
            ", ".join(str(iterations) for _, iterations, _ in results),
            ", ".join(f"{tokens:,.0f}" for _, _, tokens in results),
        )
    console.print(table)


def measure(recipe: str, seed: int, budget: int, store: str, console: Console) -> tuple[float, int, float]:
    """Trains a recipe; returns its solve rate, iterations, and generated tokens."""
    config = load_config(EXAMPLES / f"{recipe}.yaml").with_values(
        {
            "run.name": f"{recipe}-{seed}",
            "run.store": store,
            "run.seed": seed,
            "actor.lr_schedule": {},
            "validation": {},
            "checkpoint.keep": {"last": 1, "every": None},
        }
    )
    done, tokens = progress(config)
    while tokens < budget:
        train(config.with_values({"train.iterations": done + 1}))
        done, tokens = progress(config)
    with tempfile.TemporaryDirectory() as folder:
        snapshot, version = evaluation_config(config.run.name, store, None, Path(folder), {}, ())
        answers = evaluate(snapshot.with_values({"validation.data": "data/countdown/test.parquet"}), version)
    rate = float(answers["score"].mean())
    console.print(f"{config.run.name}: {rate:.1%} after {done} iterations, {tokens:,.0f} tokens")
    return rate, done, tokens


def progress(config: RunConfig) -> tuple[int, float]:
    """Returns the number of iterations that a run has closed, and of tokens generated in them."""
    try:
        run = open_run(run_url(config.run.store, config.run.name))
    except UserError:
        return 0, 0.0
    return run.state.iteration, float(run.metrics()["perf/generated_tokens"].sum())


if __name__ == "__main__":
    main()
