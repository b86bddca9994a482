"""Computes the solve rates of prompts, which decide how often `data.curriculum` draws them.

Iteration k draws by the scores of iterations up to k - `lag`. These are closed before k generates, in every mode and
after every crash, so the draws are a function of the config and of committed data.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ratchet.infra.execution.driver import Driver
from ratchet.rlhf.config import CurriculumConfig

SOLVED = 1.0
"""The smallest score of a solved answer, if the config does not set it."""
READERS = 8


def solve_rates(driver: Driver, iteration: int, curriculum: CurriculumConfig) -> dict[int, float]:
    """Returns the share of each prompt's trajectories that solved it when it was last drawn, by row of the dataset.

    Only prompts that iterations within the window drew have a rate.
    """
    end = iteration - curriculum.lag + 1
    iterations = range(max(0, end - curriculum.window), max(0, end))
    kept = driver.solve_rates
    unread = [number for number in iterations if number not in kept]
    if unread:
        with ThreadPoolExecutor(READERS) as threads:
            kept.update(zip(unread, threads.map(partial(_rates, driver, curriculum), unread), strict=True))
    rates: dict[int, float] = {}
    # a later iteration overwrites the rate of a prompt that was drawn again
    for number in iterations:
        rates |= kept[number]
    return rates


def _rates(driver: Driver, curriculum: CurriculumConfig, iteration: int) -> dict[int, float]:
    """Returns the rates of one closed iteration; none if it was given up, or if the dataset has changed since."""
    store = driver.store
    manifests = store.manifests(iteration)
    generated, scored = manifests.get("generate"), manifests.get("score")
    if generated is None or scored is None or "dataset_row" not in generated.columns:
        return {}
    if generated.fingerprint.parts.get("dataset") != driver.outside.digest("dataset"):
        return {}
    threshold = SOLVED if curriculum.solved_score is None else curriculum.solved_score
    row_of: dict[str, int] = {}
    for shard in generated.shards:
        table = store.read_shard(shard, ("trajectory_id", "dataset_row", "rollout_error"))
        row_of |= {name: row for name, row, error in zip(*table.to_pydict().values(), strict=True) if error is None}
    solved, answered = Counter[int](), Counter[int]()
    for shard in scored.shards:
        table = store.read_shard(shard, ("trajectory_id", "score", "reward_error"))
        for name, score, error in zip(*table.to_pydict().values(), strict=True):
            if error is None and name in row_of:
                answered[row_of[name]] += 1
                solved[row_of[name]] += score >= threshold
    return {row: solved[row] / count for row, count in answered.items()}
