"""Iterated reward models (arXiv 2204.05862): labels the pairs that the reward model is least sure of, trains a better
reward model on them, and forks the run with it.

Like a sweep, a round has no state of its own: each step leaves a file that is created once, or a run, and the same
command continues from the first step that is missing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from ratchet.flows.train_reward_model import accuracy_of
from ratchet.infra.execution.claims import run_url
from ratchet.infra.progress import StepProgress, report
from ratchet.infra.runs.run import open_run
from ratchet.infra.runs.unsure_pairs import unsure_pairs
from ratchet.infra.store.judge_answers import JudgeAnswers
from ratchet.infra.store.log import Corrupt, RunLog
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.run_store import parquet_bytes
from ratchet.rlhf import consent, seeding
from ratchet.rlhf.config import JudgeConfig, RewardTraining, RunConfig, overridden, validated
from ratchet.rlhf.data.examples import pair_of
from ratchet.rlhf.data.files import read
from ratchet.rlhf.data.formats import Chat, tools_column, tools_of
from ratchet.rlhf.data.labels import LABELING_CONFIG, Labels, Preferred, label_studio_tasks, read_labels
from ratchet.rlhf.errors import UserError, counted
from ratchet.rlhf.rewards import judge
from ratchet.rlhf.rewards.chat import ChatClient
from ratchet.rlhf.rewards.functions import Metadata, Trajectory
from ratchet.rlhf.schema import MESSAGES
from ratchet.tasks.analysis.plan import fork_run, latest_point

SPEC, VERDICT = "relabel.json", "verdict.json"
PAIRS, TASKS, INTERFACE = "pairs.parquet", "label_studio.json", "label_studio.xml"
LABELS, TRAIN, HELD_OUT = "labels.parquet", "train.parquet", "held_out.parquet"
PREFERENCES = pa.schema({"prompt": MESSAGES, "tools": pa.string(), "chosen": MESSAGES, "rejected": MESSAGES})
DETERMINED = ("run", "model", "data", "validation", "output")
"""Keys of the fit that the round sets."""
SEED = 0
QUESTIONS = 16
"""Largest number of concurrent questions to the judge."""
ANSWER_S = 120.0
"""Time limit of an answer of the judge."""
T = TypeVar("T")


class Relabel(BaseModel):
    """The settings of a round of labels; stored in its folder."""

    model_config = ConfigDict(frozen=True)

    parent: str
    name: str
    """Name of the round, after which its fit and its fork are named."""
    pairs: int
    """Largest number of pairs to label."""
    window: int | None
    """Newest closed iterations to choose from; None: all."""
    held_out: float
    """Share of the labelled prompts on which the models are compared."""
    also: tuple[str, ...]
    """Files of more preferences to learn from."""
    output: str

    @property
    def store(self) -> str:
        return self.parent.rpartition("/")[0]

    @property
    def fork(self) -> str:
        return f"{self.name}-run"

    def objects(self) -> ObjectStore:
        return ObjectStore(run_url(self.store, self.name))


class Verdict(BaseModel):
    """The shares of held-out pairs that the old and the new model rank as labelled."""

    pairs: int
    old: float
    new: float

    @property
    def is_worse(self) -> bool:
        return self.new < self.old


@dataclass(frozen=True)
class Pairs:
    table: pa.Table
    url: str
    """The folder of the round."""


def begin(round_: Relabel) -> Pairs:
    """Chooses the pairs to label, unless they are chosen, and writes them as a table and for Label Studio.

    Raises `UserError` if another round or a run has the name, if the run has no reward model or no pairs, or if there
    is no consent to its code.
    """
    objects = round_.objects()
    if RunLog(objects).read().slot >= 0:
        raise UserError(f"there is a run {round_.name}: choose another name (--run)")
    parent = open_run(round_.parent)
    parent.config.require_own("cannot train it with another reward model")
    consent.require(parent.config)
    stored = objects.get_if_there(SPEC)
    if stored is None:
        table = unsure_pairs(parent, round_.pairs, round_.window)
        rows = table.to_pylist()
        objects.put(PAIRS, parquet_bytes(table))
        objects.put(TASKS, label_studio_tasks(rows).encode())
        objects.put(INTERFACE, LABELING_CONFIG.encode())
        # last: it says that the pairs are complete
        stored = _once(objects, SPEC, round_.model_dump_json(indent=1).encode())
    before = _spec(objects, stored)
    if before != round_:
        changed = [name for name in Relabel.model_fields if getattr(before, name) != getattr(round_, name)]
        raise UserError(
            f"{round_.name} began with other settings ({', '.join(changed)}): repeat its command, or choose another "
            "name (--run)"
        )
    return Pairs(_table(objects, PAIRS), objects.url)


def label(round_: Relabel, pairs: Pairs, labels: str | None, asked: JudgeConfig | None) -> Labels | None:
    """Gets the labels of a round, unless it has them; None if nobody has given any.

    Args:
        labels: File of labels.
        asked: The judge to ask.

    Raises:
        UserError: The file is malformed or contradicts the labels that the round has, or the judge does not answer.
    """
    objects, ids = round_.objects(), pairs.table["pair_id"].to_pylist()
    given = None
    if labels is not None:
        given = read_labels(labels, set(ids))
    elif asked is not None and objects.get_if_there(LABELS) is None:
        given = Labels(asyncio.run(_judged(pairs.table.to_pylist(), asked, objects)), 0)
    if given is not None:
        rows = {"pair_id": ids, "preferred": [given.preferred.get(pair_id) for pair_id in ids]}
        table = pa.table(rows, pa.schema({"pair_id": pa.string(), "preferred": pa.string()}))
        if _once(objects, LABELS, parquet_bytes(table)) != parquet_bytes(table):
            raise UserError(
                f"{round_.name} has other labels already, from which its reward model is made: leave --labels out to "
                "continue with them, or choose another name (--run)"
            )
    if objects.get_if_there(LABELS) is None:
        return None
    kept = _table(objects, LABELS).to_pylist()
    preferred = {row["pair_id"]: row["preferred"] for row in kept if row["preferred"] is not None}
    return Labels(preferred, len(kept) - len(preferred))


@dataclass(frozen=True)
class Split:
    """The numbers of pairs on each side of a round's split."""

    learned: int
    """Number of labelled pairs to learn from."""
    held_out: int
    """Number of labelled pairs on which the models are compared."""
    also: int
    """Number of pairs of other files to learn from."""
    left_out: int
    """Number of pairs of other files whose prompts are held out."""


def split(round_: Relabel, pairs: Pairs, labels: Labels) -> Split:
    """Splits the labelled pairs into pairs to learn from and held-out ones, and writes both unless they are written.

    A prompt is on one side only. Ties teach nothing. Raises `UserError` if fewer than two prompts have a label other
    than a tie, if a row of a file is malformed, or if a file of more preferences has changed.
    """
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for pair in pairs.table.to_pylist():
        preferred = labels.preferred.get(pair["pair_id"])
        if preferred in ("a", "b"):
            chosen, rejected = (pair["answer_a"], pair["answer_b"])[:: 1 if preferred == "a" else -1]
            row = _preference(_chat(pair), chosen, rejected)
            by_prompt.setdefault(json.dumps(row["prompt"]), []).append(row)
    prompts = list(by_prompt)
    if len(prompts) < 2:
        raise UserError(
            f"{counted(len(prompts), 'prompt')} with a label that is no tie: label pairs of two prompts at least, one "
            "to learn from and one to hold out, under another name (--run)"
        )
    held_out = min(max(1, round(round_.held_out * len(prompts))), len(prompts) - 1)
    order = seeding.generator(SEED, "held_out").permutation(len(prompts))
    sides = [[row for place in places for row in by_prompt[prompts[place]]] for places in _cut(list(order), held_out)]
    more = [_preference(*next(both), next(both)[1]) for url in round_.also for both in _pairs(url)]
    compared = {json.dumps(row["prompt"]) for row in sides[0]}
    # no pair of a held-out prompt may be learned from
    kept = [row for row in more if json.dumps(row["prompt"]) not in compared]
    for name, rows in ((HELD_OUT, sides[0]), (TRAIN, [*sides[1], *kept])):
        content = parquet_bytes(pa.Table.from_pylist(rows, PREFERENCES))
        if _once(round_.objects(), name, content) != content:
            raise UserError(
                f"the preferences of --also ({', '.join(round_.also)}) have changed since {round_.name} began: undo "
                "that, or choose another name (--run)"
            )
    return Split(len(sides[1]), len(sides[0]), len(kept), len(more) - len(kept))


def refit_config(round_: Relabel, overrides: Sequence[str]) -> RewardTraining:
    """Returns the config of the fit that continues the run's reward model.

    Raises `UserError` if an override is wrong, or changes a value that the round determines.
    """
    taken = [change for change in overrides if change.split("=")[0].split(".")[0] in DETERMINED]
    if taken:
        raise UserError(f"{', '.join(taken)}: the round determines {', '.join(DETERMINED)}: remove it")
    scorer = open_run(round_.parent).config.reward.model
    assert scorer is not None, "the run has a reward model"
    url = round_.objects().url
    tree: dict[str, Any] = {
        "run": {"name": f"{round_.name}-fit", "store": round_.store},
        "model": {"path": scorer.path, "dtype": scorer.dtype},
        "data": f"{url}/{TRAIN}",
        "validation": f"{url}/{HELD_OUT}",
        "output": round_.output,
    }
    return validated(RewardTraining, overridden(tree, list(overrides), RewardTraining), "relabel")


def judge_new_model(round_: Relabel, config: RewardTraining, fit: Mapping[str, float]) -> Verdict:
    """Compares the new model with the old one on the held-out pairs, unless that is done."""
    objects = round_.objects()
    if (stored := objects.get_if_there(VERDICT)) is None:
        old = accuracy_of(config)
        verdict = Verdict(pairs=len(_table(objects, HELD_OUT)), old=old["val/accuracy"], new=fit["val/accuracy"])
        stored = _once(objects, VERDICT, verdict.model_dump_json(indent=1).encode())
    return _parsed(objects, VERDICT, lambda: Verdict.model_validate_json(stored))


def fork_config(round_: Relabel, iterations: int | None) -> RunConfig:
    """Forks the run with the new reward model, as late as its commits allow, unless that is done.

    It has the run's number of iterations by default. Raises `UserError` if the run has closed as many already.
    """
    parent = open_run(round_.parent)
    total = parent.config.iterations if iterations is None else iterations
    config = parent.config.with_values(
        {
            "run.name": round_.fork,
            "run.store": round_.store,
            "reward.model.path": round_.output,
            "train.iterations": total,
        }
    )
    if RunLog(ObjectStore(run_url(round_.store, round_.fork))).read().slot < 0:
        if parent.state.iteration >= total:
            raise UserError(
                f"{parent.config.run.name} has all its {total} iterations, so the new reward model would score none: "
                f"repeat the command with --iterations {parent.state.iteration + 1} or more"
            )
        fork_run(parent, config, *latest_point(parent, config, parent.state.iteration))
    return config


async def _judged(pairs: Sequence[Mapping[str, Any]], asked: JudgeConfig, objects: ObjectStore) -> dict[str, Preferred]:
    """Returns the judge's labels. It sees each pair in both orders; if it contradicts itself, the pair is a tie."""
    chat = ChatClient(
        asked.url,
        asked.model,
        asked.retries,
        asked.api_key_env,
        timeout_s=ANSWER_S,
        concurrency=QUESTIONS,
        answers=_KeptAnswers(JudgeAnswers(objects)),
    )
    preferred: dict[str, Preferred] = {}

    async def ask(pair: Mapping[str, Any]) -> None:
        messages, tools, _ = _chat(pair)
        first, second = (
            Trajectory(
                data_source=pair["data_source"],
                solution_str=pair[f"answer_{side}"],
                ground_truth=None,
                extra_info={"tools": list(tools)},
                prompt=messages,
                turns=[],
                metadata=_metadata(pair, side),
            )
            for side in ("a", "b")
        )
        share = await judge.compare(first, second, chat, asked.rubric)
        preferred[pair["pair_id"]] = "tie" if share == 0.5 else "a" if share > 0.5 else "b"
        report(StepProgress(what="pairs judged", done=len(preferred), total=len(pairs)))

    results = await asyncio.gather(*map(ask, pairs), return_exceptions=True)  # so that all answers are kept
    for failure in results:
        if failure is not None:
            raise UserError(f"{failure}: fix it and repeat the command, which asks only what is missing") from failure
    return preferred


def _chat(pair: Mapping[str, Any]) -> Chat:
    return Chat(pair["messages"], tools_of(pair, f"pair {pair['pair_id']}"))


def _pairs(url: str) -> Iterator[Iterator[tuple[Chat, str]]]:
    """Yields the preferences of a file. Raises `UserError` if a prompt calls tools, which the columns cannot hold."""
    for where, row in read(url):
        pair = list(pair_of(row, where))
        if any("tool_calls" in message for chat, _ in pair for message in chat.messages):
            raise UserError(f"{where}: the prompt calls tools, which relabel cannot keep: leave the row out")
        yield iter(pair)


class _KeptAnswers:
    """Keeps answers of the judge in the round's folder, for use on an event loop."""

    def __init__(self, answers: JudgeAnswers) -> None:
        self._answers = answers

    async def get(self, digest: str) -> str | None:
        return await asyncio.to_thread(self._answers.get, digest)

    async def keep(self, digest: str, answer: str) -> str:
        return await asyncio.to_thread(self._answers.keep, digest, answer)


def _metadata(pair: Mapping[str, Any], side: str) -> Metadata:
    return Metadata(
        trajectory_id=pair[f"trajectory_id_{side}"],
        prompt_id=pair["pair_id"],
        sample=None,
        iteration=pair["iteration"],
        policy_version=None,
        finish_reason=None,
        response_length=None,
    )


def _preference(chat: Chat, chosen: str, rejected: str) -> dict[str, Any]:
    prompt = [{"role": message["role"], "content": message["content"]} for message in chat.messages]
    answers = {"chosen": chosen, "rejected": rejected}
    return {"prompt": prompt, "tools": tools_column(chat.tools)} | {
        side: [{"role": "assistant", "content": text}] for side, text in answers.items()
    }


def _cut(items: list[T], size: int) -> tuple[list[T], list[T]]:
    return items[:size], items[size:]


def _once(objects: ObjectStore, key: str, content: bytes) -> bytes:
    """Creates an object unless it exists; returns its content."""
    try:
        objects.create(key, content)
    except FileExistsError:
        return objects.get(key)
    return content


def _spec(objects: ObjectStore, stored: bytes) -> Relabel:
    return _parsed(objects, SPEC, lambda: Relabel.model_validate_json(stored))


def _table(objects: ObjectStore, key: str) -> pa.Table:
    return _parsed(objects, key, lambda: pq.read_table(pa.BufferReader(objects.get(key))))


def _parsed(objects: ObjectStore, key: str, parse: Callable[[], T]) -> T:
    try:
        return parse()
    except (ValueError, FileNotFoundError):  # pyarrow's errors and pydantic's are ValueErrors
        raise Corrupt(f"{objects.url}/{key} is damaged or missing: begin again under another name (--run)") from None
