"""Compares the order in which `ratchet whatif` puts settings with the order in which a sweep finds them.

    OMP_NUM_THREADS=1 python benchmarks/whatif.py letters digits beginning --shared 3 --iterations 12

For each task, a tiny random Llama is trained with GRPO for `--shared` iterations. `ratchet whatif` then judges eight
settings on the last `--judged` of those that have a successor, and a sweep trains a fork with each setting, from the
last iteration on, up to `--iterations`. A fork's score is the mean of its trajectories in the last two iterations. The
figures are Spearman's rank correlation of both orders, and the CPU time of `whatif` as a share of that of the sweep,
children included.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")

import numpy as np
from rich.console import Console
from rich.table import Table

from ratchet.flows.train import train
from ratchet.infra.runs.run import Run, open_run
from ratchet.tasks.analysis.plan import fork_run, latest_point
from ratchet.tasks.analysis.whatif import by_gain, parse_arms, whatif
from tests import tiny

TASKS = {
    "letters": "tests.rewards:letters",
    "digits": "tests.rewards:digits",
    "beginning": "tests.rewards:mostly_flat",
}
"""Rewards by task: the share of letters a to m, that of digits, and whether the answer begins with a letter a to s."""
SETTINGS = (
    "actor.lr=3e-4",
    "actor.lr=1e-3",
    "actor.lr=3e-3",
    "actor.lr=1e-2",
    "actor.lr=3e-2",
    "actor.ppo_epochs=3",
    "algorithm.entropy_coef=0.1",
    "algorithm.advantage=rloo algorithm.loss.clip_ratio_high=0.28",
)
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--shared", type=int, default=4, help="iterations before the settings part")
    parser.add_argument("--iterations", type=int, default=16, help="iterations of a fork, the shared ones included")
    parser.add_argument("--judged", type=int, default=1, help="iterations that whatif judges")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console(width=120)
    for task in options.tasks:
        with tempfile.TemporaryDirectory() as folder:
            console.print(measured(Path(folder), task, options, console))


def measured(root: Path, task: str, options: argparse.Namespace, console: Console) -> str:
    """Measures a task; returns its figures."""
    tiny.model_folder(root / "model", seed=options.seed)
    tiny.prompt_file(root / "prompts.parquet", prompts=256)
    config = tiny.config(
        root,
        run__name="base",
        run__seed=options.seed,
        reward__function=TASKS[task],
        algorithm__kl={},
        algorithm__advantage="grpo",
        data__prompts_per_iteration=32,
        rollout__n=16,
        rollout__prompts_per_shard=32,
        actor__lr=3e-3,
        actor__mini_batch_trajectories=128,
        actor__micro_batch_tokens=8192,
        train__iterations=options.shared,
    )
    train(config)
    base = open_run(f"{config.run.store}/base")
    iterations = range(options.shared - 1 - options.judged, options.shared - 1)
    results, judging = timed(lambda: list(whatif(base, iterations, parse_arms(SETTINGS))))
    gains = dict(by_gain(results))
    scores, training = timed(
        lambda: {name: trained(base, number, name, options) for number, name in enumerate(SETTINGS)}
    )
    table = Table(
        "settings", "whatif: change", "whatif: sample", "score of the fork", title=f"{task}, seed {options.seed}"
    )
    for name, score in sorted(scores.items(), key=lambda pair: -pair[1]):
        gain = gains[name]
        cells = (
            ("cannot tell", "")
            if gain is None
            else (f"{gain.change:+z.4f} ± {gain.reach:.4f}", f"{gain.effective:.0%}")
        )
        table.add_row(name, *cells, f"{score:.4f}")
    console.print(table)
    told = [name for name in SETTINGS if gains[name] is not None]
    predicted = [gain.change for name in told if (gain := gains[name]) is not None]
    rank = spearman(np.array(predicted), np.array([scores[name] for name in told]))
    return (
        f"{task}: Spearman {rank:.2f} over {len(told)} of {len(SETTINGS)} settings; whatif {judging:.1f} CPU s, the "
        f"sweep {training:.0f} CPU s, a share of {judging / training:.1%}"
    )


def trained(base: Run, number: int, setting: str, options: argparse.Namespace) -> float:
    """Trains a fork with a setting; returns its mean score at the end."""
    [arm] = parse_arms([setting])
    named = {"run.name": f"arm-{number}", "train.iterations": options.iterations}
    config = base.config.with_values(named, arm.overrides)
    at = options.shared - 1
    fork_run(base, config, *latest_point(base, config, at))
    train(config)
    fork = open_run(f"{config.run.store}/arm-{number}")
    return float(fork.trajectories([options.iterations - 2, options.iterations - 1], ["score"])["score"].mean())


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Returns a result, and the CPU seconds of this process and of its ended children that it took."""
    before = cpu_seconds()
    result = work()
    return result, cpu_seconds() - before


def cpu_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Returns Spearman's rank correlation."""
    first, second = (np.argsort(np.argsort(values)) for values in (one, other))
    return float(np.corrcoef(first, second)[0, 1])


if __name__ == "__main__":
    main()
