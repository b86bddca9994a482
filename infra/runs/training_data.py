"""Datasets from the trajectories of runs: supervised examples, preference pairs, and labelled answers.

Rows have the columns that TRL's trainers and this project's fine-tuning runs read, and lead back to their trajectories.
The same selection from the same runs gives the same bytes.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa

from ratchet.infra.runs.embedded_images import with_images
from ratchet.infra.runs.query import names
from ratchet.infra.runs.run import Run
from ratchet.infra.store.images import Images
from ratchet.infra.store.run_store import ORIGIN, VALIDATE
from ratchet.rlhf import seeding
from ratchet.rlhf.data.formats import tools_column
from ratchet.rlhf.data.overlap import HeldOut, near_duplicates
from ratchet.rlhf.data.prompts import structures
from ratchet.rlhf.data.selection import Candidate, Filter, Kind, Selection, load_filter
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import IMAGES, MESSAGES, trajectory_of

COLUMNS = (
    "trajectory_id",
    "prompt_id",
    "data_source",
    "messages",
    "tools",
    "prompt",
    "response",
    "finish_reason",
    "turns",
    "calls",
    IMAGES,
    "rollout_error",
    "score",
    "reward_error",
)
FILTER_COLUMNS = ("ground_truth", "ground_truth_is_json", "extra_info", "reward_parts")
"""More columns, which only `--filter` needs."""
DIGITS = 6
"""Decimal digits of a difference of scores, which are float32: 0.9 - 0.8 is 0.1."""

Messages = tuple[tuple[str, str], ...]
"""Roles and contents."""


@dataclass(frozen=True)
class SampledResponse:
    trajectory_id: str
    text: str
    score: float
    is_cut_off: bool
    """True if it reached the token limit: a trainer would teach to end there."""


@dataclass(frozen=True)
class SampledPrompt:
    """A prompt in an iteration of a run."""

    run: str
    iteration: int
    data_source: str
    messages: Messages
    tools: str | None
    """Schemas of the functions that it offered, as JSON; None: none."""
    text: str
    """The prompt as the policy saw it."""
    images: tuple[str, ...] = ()
    """Digests of the images for the marks ``<image>`` of the messages, in order."""

    @property
    def is_text(self) -> bool:
        """True if the policy saw the contents unchanged, without a chat template."""
        return self.text == self.contents and not self.images

    @property
    def contents(self) -> str:
        """The contents, without the additions of a chat template."""
        return "\n".join(content for _, content in self.messages)


@dataclass(frozen=True)
class Row:
    """A row of the dataset."""

    question: SampledPrompt
    answers: tuple[SampledResponse, ...]
    """One answer, or of a pair the preferred and the rejected one."""
    label: bool | None = None
    """For KTO, True if the answer is good."""

    @property
    def texts(self) -> tuple[str, ...]:
        return self.question.text, *(answer.text for answer in self.answers)


@dataclass(frozen=True)
class Dataset:
    """The rows, and an account of the trajectories."""

    table: pa.Table
    trajectories: int
    """Number of trajectories that were read."""
    left_out: dict[Reason, int]
    """Numbers of trajectories, groups, answers or rows that were left out, by reason."""
    notes: tuple[str, ...]
    """Messages for the user."""

    @property
    def sources(self) -> dict[str, int]:
        return dict(sorted(Counter(self.table["data_source"].to_pylist()).items()))


class Reason(StrEnum):
    """The reasons for leaving something out, in the order in which they apply."""

    BRANCH = "trajectories: earlier branches of an agent's conversation"
    NOT_SCORED = "trajectories: failed, without a score"
    NO_PROMPT = "trajectories: without a prompt, which another trainer has not written"
    TURNS = "trajectories: several turns, or calls of tools"
    FILTER = "trajectories: left out by --filter"
    CUT_OFF = "groups: every answer is cut off"
    MIN_SCORE = "groups: no whole answer has the smallest score"
    SAME_SCORE = "groups: one answer, or no difference of scores"
    MARGIN = "groups: a difference below --margin"
    AT_MEAN = "answers: at the mean of their group"
    CUT_OFF_ANSWER = "answers: good, but cut off"
    DUPLICATE = "rows: exact duplicates"
    VALIDATION = "rows: hold a validation prompt"
    NEAR = "rows: near-duplicates"
    BALANCE = "rows: more than of the smallest data source"


LeftOut = Counter[Reason]


def dataset(runs: Sequence[Run], selection: Selection) -> Dataset:
    """Makes a dataset of the closed iterations of some runs, in the order of the runs, iterations and prompts.

    Each row names its run, iteration and trajectories; the table's metadata has the selection and the runs. Memory
    holds the trajectories of one iteration, and the rows that are kept.

    Raises:
        UserError: a run is named twice or is a fine-tuning run, the filter fails, an image is missing or damaged, or no
            row is left; the message says what was left out.
        Corrupt: an object of a run is missing or damaged.
    """
    run_names = names(runs)
    for number, run in enumerate(runs):
        if run.is_fit:
            raise UserError(f"{run.store.url} is a fit, which has no trajectories: name a run of iterations")
        if run.store.url in [other.store.url for other in runs[:number]]:
            raise UserError(f"the run at {run.store.url} is named twice: name each run once")
    keeps, digest = (None, None) if selection.filter is None else load_filter(selection.filter)
    columns = COLUMNS if keeps is None else (*COLUMNS, *FILTER_COLUMNS)
    left_out, seen, rows, read = LeftOut(), set[tuple[object, ...]](), list[Row](), 0
    for name, run in zip(run_names, runs, strict=True):
        chosen = replace(selection, min_score=_min_score(run, selection))
        for iteration in range(run.state.iteration):
            frame = run.trajectories(iteration, columns)
            read += len(frame)
            groups = groups_of(frame.to_dict("records"), name, iteration, left_out, keeps)
            for row in _rows(groups, chosen, left_out):
                key = (
                    row.question.messages,
                    row.question.tools,
                    row.question.images,
                    *(answer.text for answer in row.answers),
                )
                if key in seen:
                    left_out[Reason.DUPLICATE] += 1
                else:
                    seen.add(key)
                    rows.append(row)
    if not read:
        raise UserError(f"{', '.join(run_names)}: no iteration is closed yet, so there is nothing to make a dataset of")
    notes = []
    if selection.decontaminate:
        rows, note = _decontaminated(rows, runs, run_names, left_out)
        notes += note
    if selection.similarity < 1:
        duplicates = near_duplicates([(row.question.contents, *row.texts[1:]) for row in rows], selection.similarity)
        left_out[Reason.NEAR] += sum(duplicates)
        rows = [row for row, is_duplicate in zip(rows, duplicates, strict=True) if not is_duplicate]
    if selection.balance:
        rows = _balanced(rows, left_out)
    if not rows:
        why = "; ".join(f"{count} {reason}" for reason, count in _in_order(left_out).items())
        raise UserError(
            f"nothing is left of {read} trajectories ({why}): lower --min-score or --margin, or choose another "
            "--kind or --filter"
        )
    origin = _origin(runs, run_names, selection, digest)
    table = _table(rows, selection.kind)
    stores = {name: Images(run.store.objects) for name, run in zip(run_names, runs, strict=True)}
    table = with_images(table, [stores[row.question.run] for row in rows])
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), ORIGIN: origin})
    return Dataset(table, read, _in_order(left_out), tuple(notes))


def _in_order(left_out: LeftOut) -> dict[Reason, int]:
    return {reason: left_out[reason] for reason in Reason if left_out[reason]}


def _origin(runs: Sequence[Run], run_names: Sequence[str], selection: Selection, filter_sha256: str | None) -> bytes:
    """Encodes the dataset's origin: the selection and the runs, each as of the last record of its log."""
    states = {
        name: {
            "url": run.store.url,
            "log": run.state.slot,
            "iterations": run.state.iteration,
            "min_score": _min_score(run, selection),
        }
        for name, run in zip(run_names, runs, strict=True)
    }
    origin = {"selection": asdict(selection), "filter_sha256": filter_sha256, "runs": states}
    return json.dumps(origin, sort_keys=True).encode()


# From trajectories to rows.


def _min_score(run: Run, selection: Selection) -> float | None:
    """Returns the smallest score of a good answer: the user's, or, except for pairs, that of a solved answer if it is
    known."""
    if selection.min_score is not None or selection.kind.is_of_pairs:
        return selection.min_score
    return run.config.solved_score


def groups_of(
    trajectories: Iterable[Mapping[Hashable, Any]],
    run: str,
    iteration: int,
    left_out: LeftOut,
    keeps: Filter | None = None,
) -> list[tuple[SampledPrompt, list[SampledResponse]]]:
    """Groups the answers of an iteration by prompt, in order."""
    last_branches: dict[str, Mapping[Hashable, Any]] = {}
    for trajectory in trajectories:
        name = trajectory_of(trajectory["trajectory_id"])
        left_out[Reason.BRANCH] += name in last_branches
        last_branches[name] = trajectory
    groups: dict[tuple[str, SampledPrompt], list[SampledResponse]] = defaultdict(list)
    for trajectory in last_branches.values():
        if isinstance(trajectory["rollout_error"], str) or isinstance(trajectory["reward_error"], str):
            left_out[Reason.NOT_SCORED] += 1
            continue
        if not isinstance(trajectory["messages"], str):
            left_out[Reason.NO_PROMPT] += 1
            continue
        asked = _asked(trajectory)
        if asked is None:
            left_out[Reason.TURNS] += 1
            continue
        if keeps is not None and not keeps(_candidate(trajectory, asked[0], run, iteration)):
            left_out[Reason.FILTER] += 1
            continue
        question = SampledPrompt(
            run, iteration, trajectory["data_source"], *asked, trajectory["prompt"], _images(trajectory)
        )
        answer = SampledResponse(
            trajectory["trajectory_id"],
            trajectory["response"],
            float(trajectory["score"]),
            trajectory["finish_reason"] == "length",
        )
        groups[trajectory["prompt_id"], question].append(answer)
    return [(question, answers) for (_, question), answers in groups.items()]


def _candidate(trajectory: Mapping[Hashable, Any], messages: Messages, run: str, iteration: int) -> Candidate:
    truth, extra = (
        text if isinstance(text, str) else None for text in map(trajectory.get, ("ground_truth", "extra_info"))
    )
    ground_truth, extra_info = structures(truth, bool(trajectory["ground_truth_is_json"]), extra or "{}")
    return Candidate(
        run=run,
        iteration=iteration,
        trajectory_id=trajectory["trajectory_id"],
        prompt_id=trajectory["prompt_id"],
        data_source=trajectory["data_source"],
        messages=[{"role": role, "content": content} for role, content in messages],
        prompt=trajectory["prompt"],
        response=trajectory["response"],
        finish_reason=trajectory["finish_reason"],
        ground_truth=ground_truth,
        extra_info=extra_info,
        score=float(trajectory["score"]),
        reward_parts=dict(trajectory["reward_parts"] or {}),
    )


def _asked(trajectory: Mapping[Hashable, Any]) -> tuple[Messages, str | None] | None:
    """Returns the messages that the policy answered, and the tools that they offered.

    None if it answered several times, or an agent with a call of a tool.
    """
    asked, tools = json.loads(trajectory["messages"]), trajectory["tools"]
    if _is_list(trajectory["calls"]):  # an agent's program, which writes its own messages
        if len(trajectory["calls"]) != 1:
            return None
        [call] = trajectory["calls"]
        added, answer = json.loads(call["asked"]), json.loads(call["answer"])
        if "messages" not in added or answer.get("tool_calls"):
            return None
        asked, tools = added["messages"], tools_column(added.get("tools", ()))
    elif _is_list(trajectory["turns"]) and len(trajectory["turns"]) > 1:
        return None
    plain = all(
        set(message) - {"images"} == {"role", "content"} and isinstance(message["content"], str) for message in asked
    )
    if not plain:
        return None
    return tuple((message["role"], message["content"]) for message in asked), tools if isinstance(tools, str) else None


def _images(trajectory: Mapping[Hashable, Any]) -> tuple[str, ...]:
    """Returns the images of the prompt, which are those of a trajectory of one turn."""
    digests = trajectory[IMAGES]
    return tuple(digests) if _is_list(digests) else ()


def _is_list(value: object) -> bool:
    return isinstance(value, (list, np.ndarray))


def _rows(
    groups: Iterable[tuple[SampledPrompt, list[SampledResponse]]], selection: Selection, left_out: LeftOut
) -> Iterator[Row]:
    """Yields the rows that a selection makes of groups."""
    for question, answers in groups:
        if selection.kind is Kind.kto:
            yield from _labelled(question, answers, selection.min_score, left_out)
            continue
        whole = [answer for answer in answers if not answer.is_cut_off]
        good = [answer for answer in whole if _reaches(answer.score, selection.min_score)]
        if not good:
            left_out[Reason.MIN_SCORE if whole else Reason.CUT_OFF] += 1
            continue
        best = max(good, key=lambda answer: answer.score)  # the first of equals
        if not selection.kind.is_of_pairs:
            yield Row(question, (best,))
            continue
        worst = min(answers, key=lambda answer: answer.score)
        difference = round(best.score - worst.score, DIGITS)
        if difference <= 0 or best.text == worst.text:
            left_out[Reason.SAME_SCORE] += 1
        elif selection.margin is not None and difference < selection.margin:
            left_out[Reason.MARGIN] += 1
        else:
            yield Row(question, (best, worst))


def _labelled(
    question: SampledPrompt, answers: Sequence[SampledResponse], min_score: float | None, left_out: LeftOut
) -> Iterator[Row]:
    """Yields each answer with its label: it reaches a score, or is better than the mean of its group."""
    mean = float(np.mean([answer.score for answer in answers]))
    for answer in answers:
        above_mean = round(answer.score - mean, DIGITS)
        is_good = above_mean > 0 if min_score is None else _reaches(answer.score, min_score)
        if min_score is None and above_mean == 0:
            left_out[Reason.AT_MEAN] += 1
        elif is_good and answer.is_cut_off:
            left_out[Reason.CUT_OFF_ANSWER] += 1
        else:
            yield Row(question, (answer,), is_good)


def _reaches(score: float, least: float | None) -> bool:
    """True if a score is at least a limit."""
    # scores are float32, in which 0.7 is less than the float64 that somebody wrote
    return least is None or bool(score >= np.float32(least))


# Filters.


def _decontaminated(
    rows: list[Row], runs: Sequence[Run], run_names: Sequence[str], left_out: LeftOut
) -> tuple[list[Row], list[str]]:
    """Leaves out the rows that contain a validation prompt of any of the runs. Notes the runs without validation."""
    prompts: dict[str, None] = {}
    unchecked = []
    for name, run in zip(run_names, runs, strict=True):
        of_run = _validation_prompts(run)
        prompts |= of_run
        unchecked += [] if of_run else [name]
    notes = [f"{', '.join(unchecked)}: no validation, so no prompts to leave out"] if unchecked else []
    held_out = HeldOut(prompts, (row.question.text for row in rows))
    kept = [row for row in rows if not held_out.is_in(row.texts)]
    left_out[Reason.VALIDATION] += len(rows) - len(kept)
    return kept, notes


def _validation_prompts(run: Run) -> dict[str, None]:
    """Returns the prompts of a run's validations, as the policy saw them."""
    prompts: dict[str, None] = {}
    for iteration in range(run.state.iteration + 1):
        state = run.store.iteration_state(iteration)
        for ref in run.store.shards_of(state, VALIDATE):
            prompts |= dict.fromkeys(run.store.read_shard(ref, ["prompt"])["prompt"].drop_null().to_pylist())
    return prompts


def _balanced(rows: Sequence[Row], left_out: LeftOut) -> list[Row]:
    """Draws as many rows of each data source as the smallest has."""
    by_source: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        by_source[row.question.data_source].append(number)
    size = min(map(len, by_source.values()), default=0)
    kept = [
        numbers[place]
        for source, numbers in by_source.items()
        for place in seeding.generator(0, "balance", source).permutation(len(numbers))[:size]
    ]
    left_out[Reason.BALANCE] += len(rows) - len(kept)
    return [rows[number] for number in sorted(kept)]


# The columns.


def _table(rows: Sequence[Row], kind: Kind) -> pa.Table:
    """Converts the rows to columns. Prompts and answers are texts if no policy had a chat template, else messages."""
    as_text = all(row.question.is_text for row in rows)
    form = pa.string() if as_text else MESSAGES

    def prompt(row: Row) -> str | list[dict[str, str]]:
        if as_text:
            return row.question.text
        return [{"role": role, "content": content} for role, content in row.question.messages]

    def answers(side: int) -> pa.Array:
        texts = (row.answers[side].text for row in rows)
        return pa.array([text if as_text else [{"role": "assistant", "content": text}] for text in texts], form)

    def of_side(side: int, name: str) -> dict[str, pa.Array]:
        return {
            f"trajectory_id{name}": pa.array([row.answers[side].trajectory_id for row in rows], pa.string()),
            f"score{name}": pa.array([row.answers[side].score for row in rows], pa.float32()),
        }

    columns = {"prompt": pa.array(list(map(prompt, rows)), form)}
    if any(row.question.images for row in rows):
        columns[IMAGES] = pa.array([list(row.question.images) for row in rows], pa.list_(pa.string()))
    if any(row.question.tools for row in rows):
        columns["tools"] = pa.array([row.question.tools for row in rows], pa.string())
    if kind.is_of_pairs:
        columns |= {"chosen": answers(0), "rejected": answers(1)}
    else:
        columns |= {"completion": answers(0)}
    if kind is Kind.kto:
        columns["label"] = pa.array([row.label for row in rows], pa.bool_())
    columns |= {
        "data_source": pa.array([row.question.data_source for row in rows], pa.string()),
        "run": pa.array([row.question.run for row in rows], pa.string()),
        "iteration": pa.array([row.question.iteration for row in rows], pa.int64()),
    }
    columns |= of_side(0, "_chosen") | of_side(1, "_rejected") if kind.is_of_pairs else of_side(0, "")
    return pa.table(columns)
