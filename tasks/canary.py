"""Checks, after each transfer of weights, that the rollout has them; `ratchet.rlhf.rollout.canary` has the method.

The check is committed with what it compared, and a wrong rollout never generates: with `rollout.canary: stop` the run
stops, and the next driver transfers the weights again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ratchet.infra.execution.driver import Driver
from ratchet.infra.progress import note
from ratchet.infra.store.log import Corrupt
from ratchet.infra.store.records import CANARIES, CanaryCheck, Weights, sha256_of
from ratchet.infra.workers.worker import Worker
from ratchet.infra.workers.worker_groups import WorkerGroup
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.roles import ROLES
from ratchet.rlhf.data.chat_turns import state_of
from ratchet.rlhf.data.prompts import encode
from ratchet.rlhf.errors import RatchetError
from ratchet.rlhf.rollout.canary import DRAWN, TEXTS, TOKENS, Before, Canary, Finding, LogProbs, tolerance
from ratchet.rlhf.rollout.canary import check as compared
from ratchet.rlhf.rollout.engine import Scored

_LOG_PROBS, _IDS = pa.list_(pa.float32()), pa.list_(pa.int32())
CANARY_COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "version": (pa.int32(), "number of updates of the weights that were transferred"),
    "engine": (pa.string(), "the engine of the rollout, such as a server's URL"),
    "text": (pa.int32(), "number of the text, from 0"),
    "ids": (_IDS, "tokens of the text"),
    "trainer_log_probs": (
        _LOG_PROBS,
        "log-prob of each but the first of these, by the actor, in nats, at temperature 1",
    ),
    "rollout_log_probs": (_LOG_PROBS, "the same by the engine"),
    "trainer_log_probs_before": (_LOG_PROBS, "trainer_log_probs of the last check of other weights; null: none"),
    "rollout_log_probs_before": (_LOG_PROBS, "rollout_log_probs of that check; null: none"),
    "drawn_ids": (_IDS, "tokens that the engine drew after the text"),
    "drawn_log_probs": (_LOG_PROBS, "their log-probs as they were drawn, perhaps with its prefix cache"),
    "drawn_log_probs_again": (_LOG_PROBS, "their log-probs, computed once more without it"),
}
"""Columns of the files of checks, a row for each text and engine: types and meanings."""


class WrongWeights(RatchetError):
    """The rollout does not have the weights that were transferred to it."""


def exists(config: RunConfig) -> bool:
    """True if the rollout has weights of its own that can be checked."""
    rollout = config.rollout
    shares = ROLES["rollout"].shares_actor(config) and config.pool_of("rollout") == config.pool_of("actor")
    return config.train.updates and rollout.canary != "off" and rollout.engine.scores_texts and not shares


def needs_actor(driver: Driver, weights: Weights) -> bool:
    """True if the actor has to score the texts with `weights`, and will train from them in any case."""
    last = driver.state.canary
    is_scored = last is not None and last.weights == weights
    return bool(driver.term) and exists(driver.config) and driver.config.rollout.mode == "sync" and not is_scored


def expected(driver: Driver, weights: Weights) -> Canary | None:
    """Lets the actor score the texts with `weights`, which are about to be transferred.

    Returns None if there is nothing to compare with: the run has no check, or its actor has moved on from weights that
    were not checked before.
    """
    if not driver.term or not exists(driver.config):  # term 0: a driver that only reads
        return None
    if driver.canary_texts is None:
        driver.canary_texts = _texts(driver)
    texts, last = driver.canary_texts, _last(driver)
    if not texts:
        return None
    if last is not None and last.canary.texts != texts:
        last = None
    if last is not None and last.weights == weights:
        return last.canary
    log_probs = driver.groups.of("actor").call(Worker.log_probs_of, weights, texts)
    if log_probs is None or not all(map(math.isfinite, chain.from_iterable(log_probs))):
        return None
    before = None if last is None else Before(last.canary.log_probs, last.engines)
    return Canary(texts, tuple(map(tuple, log_probs)), before)


@dataclass(frozen=True)
class _Last:
    """The newest committed check."""

    weights: Weights
    canary: Canary
    engines: Mapping[str, LogProbs]


def _last(driver: Driver) -> _Last | None:
    """Reads the newest check; None without one. What it teaches is lost with its file, and nothing else is."""
    committed = driver.state.canary
    if committed is None:
        return None
    try:
        table = driver.store.read_shard(committed.data)
    except Corrupt as error:
        note(f"{error}; old weights in the rollout are not noticed until the next check")
        return None
    names: list[str] = list(dict.fromkeys(table["engine"].to_pylist()))

    def of(name: str, column: str) -> Any:
        values = table.filter(pc.equal(table["engine"], name))[column].to_pylist()
        return tuple(map(tuple, values)) if None not in values else None

    first = names[0]  # the trainer's side is the same for each
    trainer_before = of(first, "trainer_log_probs_before")
    known = {name: log_probs for name in names if (log_probs := of(name, "rollout_log_probs_before")) is not None}
    before = None if trainer_before is None else Before(trainer_before, known)
    canary = Canary(of(first, "ids"), of(first, "trainer_log_probs"), before)
    return _Last(committed.weights, canary, {name: of(name, "rollout_log_probs") for name in names})


def check(driver: Driver, group: WorkerGroup, weights: Weights, canary: Canary) -> None:
    """Lets the rollout score the texts, and commits the comparison.

    Raises:
        WrongWeights: the rollout has other weights, and `rollout.canary` is stop.
    """
    config, state = driver.config, driver.state
    scored = group.call(Worker.score, canary.texts, DRAWN)
    engine = _depends_on(config)
    learned = state.canary_differences
    if len(learned) < CANARIES or state.canary is None or state.canary.engine != engine:
        learned = []
    limit = tolerance(learned, config.model.dtype, quantized=config.rollout.engine.rounds_weights)
    findings = {name: compared(canary, name, texts, limit) for name, texts in scored.items()}
    worst = max(findings, key=lambda name: (findings[name].problem is not None, findings[name].difference))
    finding, problem = findings[worst], _sentence(worst, findings[worst], weights)
    committed = CanaryCheck(
        iteration=state.iteration,
        weights=weights,
        data=driver.store.write_canary(weights.version, _table(weights, canary, scored)),
        engine=engine,
        difference=finding.difference,
        cache_difference=max(found.cache_difference for found in findings.values()),
        tolerance=limit,
        problem=problem,
    )
    driver.store.commit(committed)
    if problem is None:
        return
    if config.rollout.canary == "note":
        return note(problem)
    raise WrongWeights(
        f"{problem}; nothing was generated with it. `ratchet resume {config.run.name}` transfers the weights again; "
        "rollout.canary=note continues in any case"
    )


def _sentence(name: str, finding: Finding, weights: Weights) -> str | None:
    if finding.problem is None:
        return None
    return f"{name} should have the actor's weights after {weights.version} updates, but {finding.problem}"


def _depends_on(config: RunConfig) -> str:
    """Returns the digest of what the size of differences depends on."""
    rollout = config.rollout.engine.model_dump_json(exclude={"urls", "timeout_s", "weights_folder", "cpu_cache_gib"})
    return sha256_of(f"{rollout}\n{config.actor.engine.model_dump_json()}\n{config.model.model_dump_json()}".encode())


def _texts(driver: Driver) -> tuple[tuple[int, ...], ...]:
    """Returns the texts, which all differ: the first prompts of the run, joined until each text has its length. Empty
    if the run's limits leave no room for any."""
    data, resources = driver.config.data, driver.groups.local.worker.resources
    room = data.max_prompt_tokens + driver.config.rollout.max_response_tokens - DRAWN - 1
    length = min(TOKENS, room)
    if length < 2:
        return ()
    dataset = resources.dataset(data.train)
    texts: dict[tuple[int, ...], None] = {}
    ids: list[int] = []
    images = state_of(resources.tokenizer).images
    for cursor in range(TEXTS * TOKENS):
        [row] = dataset.draw(driver.config.run.seed, cursor, 1)
        _, prompt = encode(
            dataset[row],
            resources.tokenizer,
            max_tokens=data.max_prompt_tokens,
            truncation=data.truncation,
            system_prompt=data.system_prompt,
        )
        ids += prompt if images is None else images.left_out(prompt)
        if len(ids) >= length:
            texts[tuple(ids[:length])] = None
            ids = []
            if len(texts) == TEXTS:
                break
    return tuple(texts)


def _table(weights: Weights, canary: Canary, scored: Mapping[str, Sequence[Scored]]) -> pa.Table:
    before = canary.before
    engines_before = {} if before is None else before.engines
    rows = [
        {
            "version": weights.version,
            "engine": name,
            "text": number,
            "ids": canary.texts[number],
            "trainer_log_probs": canary.log_probs[number],
            "rollout_log_probs": text.log_probs,
            "trainer_log_probs_before": None if before is None else before.trainer[number],
            "rollout_log_probs_before": engines_before[name][number] if name in engines_before else None,
            "drawn_ids": text.drawn_ids,
            "drawn_log_probs": text.drawn_log_probs,
            "drawn_log_probs_again": text.again,
        }
        for name, texts in scored.items()
        for number, text in enumerate(texts)
    ]
    return pa.Table.from_pylist(rows, pa.schema({name: kind for name, (kind, _) in CANARY_COLUMNS.items()}))
