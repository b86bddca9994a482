"""Draws earlier trajectories, or answers of experts, for experience replay (`data.replay`).

The draw depends on the seed and on what the runs have committed. The rows of `generate` hold its result, so nothing is
drawn twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from ratchet.infra.execution.driver import Driver
from ratchet.infra.progress import note
from ratchet.infra.runs.forks import name_of
from ratchet.infra.runs.run import open_run
from ratchet.infra.store.manifest import Manifest
from ratchet.infra.store.records import seen_from_fork
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.calls import Experience, ExpertExperience
from ratchet.rlhf import seeding
from ratchet.rlhf.config import OWN, ReplayConfig
from ratchet.rlhf.data.expert_answers import Matched
from ratchet.rlhf.errors import UserError

COLUMNS = ("trajectory_id", "prompt_id", "dataset_row", "response_mask", "rollout_error")
NOISE = 0x7E91A7
"""Separates this draw from others of the same seed."""


def replayed_prompts(share: float, prompts: int) -> int:
    """Returns the number of an iteration's prompts, its last ones, that are drawn with their answers."""
    return min(prompts, round(share * prompts))


def check_experience(driver: Driver) -> None:
    """Checks that the runs of `data.replay` exist and drew from the same prompts, and that its files have answers.

    Raises `UserError` if one of them does not.
    """
    replay = driver.config.data.replay
    if replay is not None and replay.files is not None:
        _expert_answers(driver, replay.files)
    for url in replay.sources if replay is not None else ():
        if url != OWN:
            store = _store_of(driver, url)
            if (last := store.state.iteration - 1) >= 0:
                _check_dataset(driver, url, store.manifests(last).get("generate"))


def draw_experience(
    driver: Driver, iteration: int, numbers: range, replay: ReplayConfig, *, seed: int, prompts: int, n: int, limit: int
) -> Mapping[int, Experience | ExpertExperience]:
    """Draws prompts with the answers that they got before, or with answers of experts.

    Args:
        numbers: Numbers of a shard's prompts in the iteration.
        prompts: Number of prompts of the iteration.
        n: Number of answers per prompt.
        limit: Largest number of tokens of an answer.

    Returns:
        The replaced prompts of the shard, by number. Fewer than `replay.share` if there is too little to draw from.

    Raises:
        UserError: A run does not exist, or drew from other prompts.
    """
    count = replayed_prompts(replay.share, prompts)
    if numbers.stop <= prompts - count:
        return {}
    if replay.files is not None:
        return _of_experts(
            driver, iteration, numbers, replay.files, replay.answers, seed, range(prompts - count, prompts)
        )
    known = [experience for url in replay.sources for experience in _of_run(driver, url, iteration, replay, n, limit)]
    # drawn for the whole iteration, so that its shards draw different prompts
    order = np.random.default_rng([seed, iteration, NOISE]).permutation(len(known))
    drawn = zip(range(prompts - count, prompts), (known[place] for place in order), strict=False)
    return {number: experience for number, experience in drawn if number in numbers}


def _of_experts(
    driver: Driver, iteration: int, numbers: range, paths: tuple[str, ...], answers: int, seed: int, replayed: range
) -> dict[int, ExpertExperience]:
    """Draws prompts with answers of experts, in epochs over the prompts that have any.

    Args:
        numbers: Numbers of a shard's prompts in the iteration.
        answers: Number of answers per prompt; fewer if the files do not have as many.
        replayed: Numbers of the iteration's prompts that are drawn this way.
    """
    by_row = _expert_answers(driver, paths).by_row
    rows = list(by_row)
    places = seeding.epochs(seed, "experts", len(rows), iteration * len(replayed), len(replayed))
    drawn: dict[int, ExpertExperience] = {}
    for number, place in zip(replayed, places, strict=True):
        if number in numbers:
            known = by_row[rows[place]]
            order = seeding.generator(seed, "experts", iteration, number).permutation(len(known))[:answers]
            drawn[number] = ExpertExperience(rows[place], paths, tuple(known[index] for index in order))
    return drawn


def _expert_answers(driver: Driver, paths: tuple[str, ...]) -> Matched:
    """Returns the answers of experts to the run's prompts; matches them once."""
    if driver.expert_answers is None:
        config, resources = driver.config, driver.groups.local.worker.resources
        experts = resources.experts(paths)
        matched = experts.matched(
            resources.dataset(config.data.train),
            resources.tokenizer,
            system_prompt=config.data.system_prompt,
            max_tokens=config.rollout.max_response_tokens,
        )
        if matched.too_long:
            note(
                f"{matched.too_long} of the {len(experts)} answers in data.replay.files are longer than "
                f"rollout.max_response_tokens {config.rollout.max_response_tokens}: left out"
            )
        if matched.unknown:
            note(
                f"{matched.unknown} of the {len(experts)} answers in data.replay.files are to prompts that data.train "
                "does not have, or that have other tokens: left out"
            )
        if not matched.by_row:
            raise UserError(
                f"data.replay.files ({', '.join(paths)}): no answer is left: of {len(experts)}, {matched.too_long} are "
                f"longer than rollout.max_response_tokens {config.rollout.max_response_tokens}, and "
                f"{matched.unknown} are to prompts that data.train does not have (messages and tools must be equal, "
                "and those of trajectories with tokens token by token)"
            )
        driver.expert_answers = matched
    return driver.expert_answers


def _store_of(driver: Driver, url: str) -> RunStore:
    """Returns another run's store, in the state in which the driver read it first."""
    if url not in driver.experience_runs:
        driver.experience_runs[url] = open_run(url).store
    return driver.experience_runs[url]


def _of_run(driver: Driver, url: str, iteration: int, replay: ReplayConfig, n: int, limit: int) -> list[Experience]:
    """Returns the prompts of a run that can be drawn with their answers, in order."""
    if url == OWN:
        store, end = driver.store, iteration
    else:
        store = _store_of(driver, url)
        end = store.state.iteration
    first = 0 if replay.window is None else max(0, end - replay.window)
    groups: list[Experience] = []
    for number in range(first, end):
        key = (url, number)
        if key not in driver.experience:
            driver.experience[key] = _of_iteration(driver, store, url, number, n, limit)
        groups += driver.experience[key]
    return groups


def _of_iteration(driver: Driver, store: RunStore, url: str, iteration: int, n: int, limit: int) -> list[Experience]:
    generated = store.manifests(iteration).get("generate")
    if generated is None or "dataset_row" not in generated.columns:
        return []
    if url == OWN and not _is_same_dataset(driver, generated):
        return []
    if url != OWN:
        _check_dataset(driver, url, generated)
        generated = seen_from_fork(name_of(store.url, driver.store.url), generated)
    dataset = driver.groups.local.worker.resources.dataset(driver.config.data.train)
    groups: list[Experience] = []
    columns = (*COLUMNS, *(("replayed_from",) if "replayed_from" in generated.columns else ()))
    name = driver.store.url.rpartition("/")[2] if url == OWN else store.url.rpartition("/")[2]
    for shard in generated.shards:
        answers: dict[tuple[str, int], int] = defaultdict(int)
        for row in driver.store.read_shard(shard, columns).to_pylist():
            is_whole = row["rollout_error"] is None and len(row["response_mask"]) <= limit
            if is_whole and row.get("replayed_from") is None:
                answers[row["prompt_id"], row["dataset_row"]] += 1
        groups += [
            Experience(row, prompt_id, shard, f"{name} {iteration}")
            for (prompt_id, row), count in answers.items()
            # fewer answers would not fill a group
            if count >= n and dataset.has_row(row)
        ]
    return groups


def _is_same_dataset(driver: Driver, generated: Manifest) -> bool:
    return generated.fingerprint.parts.get("dataset") == driver.outside.digest("dataset")


def _check_dataset(driver: Driver, url: str, generated: Manifest | None) -> None:
    if generated is not None and not _is_same_dataset(driver, generated):
        raise UserError(
            f"data.replay.runs: {url} drew from other prompts than data.train: choose a run with the same prompts"
        )
