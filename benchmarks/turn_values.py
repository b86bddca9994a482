"""Compares VinePPO, which plays on from every turn, with GRPO after the same number of steps of the environment.

    ratchet demo guess                           # once: the numbers to guess and the supervised model
    OMP_NUM_THREADS=1 python benchmarks/turn_values.py --steps 60000 --seeds 0 1 2

Both play the game of examples/guess, from the same weights, with about as many steps of the environment and as many
updates in each iteration. Every fourth iteration is validated with 16 games for each number, which do not count. The
first table has the share of games that are won after so many steps; the second compares the values of turns, from 16
continuations each, with those from 64 others. If the script is stopped, the same command continues.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")

import numpy as np
from rich.console import Console
from rich.table import Table

from ratchet.flows.train import train
from ratchet.infra.execution.claims import run_url
from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.config import RunConfig, load_config
from ratchet.rlhf.errors import UserError

VALIDATED = 4
"""Iterations between validations."""
RECIPE = Path(__file__).parents[1] / "examples" / "guess" / "guess.yaml"
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"rollout.n": 16, "actor.mini_batch_trajectories": 120},
    "vine_ppo": {
        "rollout.n": 4,
        "rollout.continuations": 2,
        "algorithm.advantage": {"type": "vine_ppo"},
        "actor.mini_batch_trajectories": 30,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60_000, help="steps of the environment")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--store", default="file://./runs/turn_values")
    options = parser.parse_args()
    console = Console()
    marks = [options.steps * sixth // 6 for sixth in range(1, 7)]
    table = Table("recipe", *(f"{mark:,}" for mark in marks), "continued turns")
    for name in RECIPES:
        curves, shares = [], []
        for seed in options.seeds:
            run = trained(config_of(name, seed, options.store), options.steps)
            curves.append(won_at(run, marks))
            shares.append(continued_share(run))
            console.print(f"{name}, seed {seed}: {', '.join(f'{value:.1%}' for value in curves[-1])}")
        means, spreads = np.mean(curves, axis=0), np.std(curves, axis=0)
        cells = [f"{mean:.1%} ± {spread:.1%}" for mean, spread in zip(means, spreads, strict=True)]
        table.add_row(name, *cells, f"{np.mean(shares):.0%}")
    console.print(table)
    compare_values(options.store, console)


def config_of(name: str, seed: int, store: str, **more: Any) -> RunConfig:
    common = {
        "run.name": f"{name}-{seed}",
        "run.store": store,
        "run.seed": seed,
        "validation.every": VALIDATED,
        "checkpoint.keep": {"last": 1, "every": None},
    }
    return load_config(RECIPE).with_values({**common, **RECIPES[name], **more})


def trained(config: RunConfig, budget: int) -> Run:
    """Trains until the environment has answered so many turns, a few iterations at a time."""
    url = run_url(config.run.store, config.run.name)
    while True:
        try:
            run = open_run(url)
        except UserError:
            done, steps = 0, 0.0
        else:
            done, steps = run.state.iteration, float(steps_of(run).sum())
        if steps >= budget:
            return run
        train(config.with_values({"train.iterations": done + VALIDATED}))


def steps_of(run: Run) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Returns the number of turns that the environment answered in each iteration."""
    played = run.trajectories(columns=["iteration", "turn_ends"])
    played["turns"] = [len(ends) for ends in played["turn_ends"]]
    steps = played.groupby("iteration")["turns"].sum().to_numpy(dtype=np.float64)
    return steps + continued_turns(run)[: len(steps)]


def continued_turns(run: Run) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    metrics = run.metrics()
    if "turn_values/turns" not in metrics:
        return np.zeros(len(metrics))
    return metrics["turn_values/turns"].to_numpy(dtype=np.float64)


def continued_share(run: Run) -> float:
    return float(continued_turns(run).sum() / steps_of(run).sum())


def won_at(run: Run, marks: list[int]) -> list[float]:
    """Returns the share of games won after so many steps, between validations on a straight line."""
    won = run.validation(columns=["score"]).groupby("iteration")["score"].mean()
    # what is validated are the weights before an iteration's update
    before = np.concatenate([[0.0], np.cumsum(steps_of(run))])
    return [float(value) for value in np.interp(marks, before[won.index], won)]


def compare_values(store: str, console: Console) -> None:
    """Prints how many values from 16 continuations are within two standard errors of the mean of 64 others."""
    config = config_of("vine_ppo", 0, store, **{"rollout.continuations": 80, "run.name": "values", "validation": {}})
    run = trained(config, 1)
    differences, errors = [], []
    for returns in run.trajectories(columns=["continuation_returns"])["continuation_returns"]:
        for of_state in list(returns)[1:]:
            few, many = np.array(of_state[:16]), np.array(of_state[16:])
            differences.append(few.mean() - many.mean())
            errors.append(np.sqrt(few.var(ddof=1) / len(few) + many.var(ddof=1) / len(many)))
    within = np.abs(differences) <= 2 * np.array(errors)
    console.print(
        f"{np.mean(within):.1%} of {len(within)} values of turns are within two standard errors of 64 other "
        f"continuations; mean difference {np.mean(differences):+.4f}"
    )


if __name__ == "__main__":
    main()
