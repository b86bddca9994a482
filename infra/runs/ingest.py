"""Logs of chats as prompts and trajectories: the stored answers of `ratchet serve`, and files of conversations or of
agents' trajectories (ATIF)."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from ratchet.infra.runs.atif import conversations, is_atif
from ratchet.infra.runs.run import Run
from ratchet.infra.runs.served import served
from ratchet.rlhf.data.examples import example_of
from ratchet.rlhf.data.files import open_rows, read
from ratchet.rlhf.data.folders import data_files, name_of
from ratchet.rlhf.data.formats import Messages, tools_column
from ratchet.rlhf.errors import UserError, counted, in_one_line
from ratchet.rlhf.schema import MESSAGES, TRAJECTORY

PROMPTS = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": MESSAGES,
        "tools": pa.string(),
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct({"id": pa.string(), "score": pa.float64()}),
    }
)
"""Columns of the prompts, in verl's layout."""
TRAJECTORIES = pa.schema(
    {
        "id": pa.string(),
        "source": pa.string(),
        "data_source": pa.string(),
        "prompt": MESSAGES,
        "tools": pa.string(),
        "response": pa.string(),
        "score": pa.float64(),
        "prompt_ids": pa.list_(pa.int32()),
        "response_ids": pa.list_(pa.int32()),
        "rollout_log_probs": pa.list_(pa.float32()),
        "policy_version": pa.int32(),
        **{name: TRAJECTORY[name].type for name in ("response_mask", "finish_reason", "reward_parts", "calls")},
    }
)
"""Columns of the trajectories.

Those of tokens are null if the log is a file of texts. `response` is null, and `response_mask` says which tokens are
the policy's, if there are several answers or calls of tools. Only agents' trajectories have the last four."""
SCORES = ("score", "rating")
"""Columns of a rating, in order of precedence."""
CALLS = "calls of tools, or /v1/completions"
"""The reason for leaving out an answer whose prompt a dataset cannot hold."""
NO_TEXT = "an agent's, without tokens, that is no chat without tools"
FAILED = "an error ended the trajectory"
HARBOR = "result.json"
"""File beside the folder of a trial's trajectory in a job of Harbor, which has the rewards."""
SHOWN = 20
"""Maximum number of mistakes that an error lists."""


@dataclass(frozen=True)
class Ingested:
    """The prompts and trajectories that were read from logs."""

    prompts: pa.Table
    """The distinct prompts; columns `PROMPTS`."""
    trajectories: pa.Table
    """The answers; columns `TRAJECTORIES`."""
    left_out: Mapping[str, int]
    """Numbers of answers that were left out, by reason."""
    unknown: int
    """Number of ratings whose id matches no answer."""


def ingest(sources: Sequence[Run | str], ratings: str | None = None, min_score: float | None = None) -> Ingested:
    """Reads logs of chats.

    Args:
        sources: runs whose snapshots were served; files, or folders of files, of conversations: rows of `messages` or
            `conversations` that end with an answer, or of `prompt` and `response`, perhaps with `id`, `score` or
            `rating`, and `data_source`; and those of ATIF, one trajectory in a JSON file or a line.
        ratings: file with rows of `id`, the id of a completion, and `score` or `rating`; it may rate answers of runs
            and of files.
        min_score: leave answers with a lower score, or none, out of the trajectories.

    Returns:
        The prompts and the trajectories. Of a run, each answer is a trajectory; of a file, the last answer of each row;
        of ATIF, each conversation.

    Raises:
        UserError: rows are malformed (the message names them), a run was never served, or nothing is left.
        Corrupt: answers of a run are missing or damaged.
    """
    rated = {} if ratings is None else _ratings(ratings)
    prompts: dict[str, dict[str, Any]] = {}
    trajectories: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()
    known, mistakes = set[str](), list[str]()
    for source in sources:
        for trajectory in (
            _of_run(source, left_out) if isinstance(source, Run) else _of_files(source, left_out, mistakes)
        ):
            known.add(trajectory["id"])
            trajectory["score"] = rated.get(trajectory["id"], trajectory["score"])
            if trajectory["prompt"] is not None and trajectory.pop("is_question", True):
                truth = trajectory.get("ground_truth")
                prompts.setdefault(
                    json.dumps([trajectory["prompt"], trajectory.get("tools")]),
                    {
                        "data_source": trajectory["data_source"],
                        "prompt": trajectory["prompt"],
                        "tools": trajectory.get("tools"),
                        "ability": "",
                        "reward_model": {"style": "", "ground_truth": truth if isinstance(truth, str) else None},
                        "extra_info": {"id": trajectory["id"], "score": trajectory["score"]},
                    },
                )
            if not trajectory.pop("is_whole", True):
                continue
            if min_score is not None and (trajectory["score"] is None or trajectory["score"] < min_score):
                left_out[f"no score of at least {min_score:g}"] += 1
            else:
                trajectories.append(trajectory)
    if mistakes:
        more = [f"and {counted(len(mistakes) - SHOWN, 'more mistake')}"] if len(mistakes) > SHOWN else []
        raise UserError("\n".join([*mistakes[:SHOWN], *more]))
    if not prompts and not trajectories:
        reasons = "; ".join(f"{counted(count, 'answer')}: {reason}" for reason, count in left_out.items())
        raise UserError(f"nothing is left of these logs{f' ({reasons})' if reasons else ''}")
    return Ingested(
        pa.Table.from_pylist(list(prompts.values()), PROMPTS),
        pa.Table.from_pylist(trajectories, TRAJECTORIES),
        left_out,
        len(rated.keys() - known),
    )


def _of_run(run: Run, left_out: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yields the answers to chats without calls of tools, whose prompts a dataset can hold."""
    name = run.store.url.rpartition("/")[2]
    if not run.store.served_keys():
        if run.state.claim is not None and not run.is_fit:
            run.config.require_weights()
        raise UserError(f"{name} was never served: `ratchet serve {name}` stores answers")
    by_branch: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for call in served(run.store).to_pylist():
        by_branch[call["branch"]].append(call)
    for calls in by_branch.values():
        messages: Messages = []
        ids: list[int] = []
        tools: list[dict[str, Any]] = []
        for call in calls:
            asked, answer = json.loads(call["asked"]), json.loads(call["answer"])
            messages = [*messages, *asked.get("messages", ())]
            ids = [*ids, *call["heard_ids"]]
            tools = asked.get("tools", tools)  # only the first call of a branch has them
            is_text = "messages" in asked and all(map(_is_plain, (*messages, answer)))
            if is_text:
                if call["finish_reason"] == "length":  # training on it would teach to stop there
                    left_out["cut off at the token limit"] += 1
                yield {
                    "is_whole": call["finish_reason"] != "length",
                    "id": call["call_id"],
                    "source": run.store.url,
                    "data_source": name,
                    "prompt": messages,
                    "tools": tools_column(tools),
                    "response": answer["content"],
                    "score": None,
                    "prompt_ids": ids,
                    "response_ids": call["ids"],
                    "rollout_log_probs": call["log_probs"],
                    "policy_version": call["versions"][0] if call["versions"] else None,
                }
            else:
                left_out[CALLS] += 1
            messages, ids = [*messages, answer], [*ids, *call["ids"]]


def _is_plain(message: Mapping[str, Any]) -> bool:
    return not message.get("tool_calls") and message["role"] != "tool" and message.get("content") is not None


def _of_files(url: str, left_out: Counter[str], mistakes: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the answers of a file, or of all files of a folder. A malformed file adds to the mistakes."""
    numbers = count()
    for file in data_files(url):
        try:
            for where, row in open_rows(file):
                name = f"{name_of(url)}-{next(numbers):06d}"
                if is_atif(row):
                    yield from _of_atif(row, where, file, name, left_out)
                else:
                    yield from _of_chat(row, where, url, name, left_out)
        except UserError as error:
            mistakes += str(error).splitlines()


def _of_chat(
    row: Mapping[str, Any], where: str, url: str, name: str, left_out: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Yields the last answer of a chat without calls of tools."""
    if (example := example_of(row, where)) is None:
        raise UserError(
            f"{where}: chats are rows of messages or conversations that end with an answer, or of prompt and "
            f"response; there are {in_one_line(', '.join(row))}"
        )
    (prompt, tools, images), response = example
    if images:
        raise UserError(f"{where} has images, which ingest cannot keep: leave out such rows")
    if not all(map(_is_plain, prompt)):
        left_out[CALLS] += 1
        return
    yield {
        "id": str(row.get("id") or name),
        "source": url,
        "data_source": str(row.get("data_source") or name_of(url)),
        "prompt": prompt,
        "tools": tools_column(tools),
        "response": response,
        "score": _score(row, where),
    }


def _of_atif(
    tree: Mapping[str, Any], where: str, url: str, name: str, left_out: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Yields the conversations of an agent's trajectory; only the first one asks what a dataset asked."""
    reward = _reward_of_trial(Path(url))
    for number, row in enumerate(conversations(tree, where, name)):
        left_out[FAILED] += not row["is_whole"]
        if row["response"] is None and "response_ids" not in row:
            left_out[NO_TEXT] += row["is_whole"]
            continue
        row["score"] = reward if row["score"] is None else row["score"]
        source = {"source": url, "data_source": row["data_source"] or name_of(url)}
        yield {**row, **source, "is_question": number == 0}


def _reward_of_trial(trajectory: Path) -> float | None:
    """Returns the reward that Harbor stores beside the trajectory of a trial; None elsewhere."""
    path = trajectory.parent.parent / HARBOR
    if trajectory.parent.name != "agent" or not path.is_file():
        return None
    return rewards_of_trial(read_trial(path), path).get("reward")


def read_trial(path: Path) -> dict[str, Any]:
    """Reads the `HARBOR` file of a trial. Raises UserError if it is no JSON object."""
    try:
        trial = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: this is no JSON ({in_one_line(error)}): correct it, or move the file") from None
    if not isinstance(trial, dict):
        raise UserError(f"{path}: this is no JSON object: correct it, or move the file")
    return trial


def rewards_of_trial(trial: Mapping[str, Any], path: Path) -> dict[str, float]:
    """Returns the rewards of a trial by name; empty if there are none, or an error made them void.

    Raises:
        UserError: they are no numbers.
    """
    verified = trial.get("verifier_result")
    rewards = verified.get("rewards") if isinstance(verified, Mapping) else verified
    if trial.get("reward_valid") is False or rewards is None:
        return {}
    if not isinstance(rewards, Mapping):
        raise UserError(f"{path}: verifier_result.rewards is no JSON object: correct it, or move the file")
    numbers: dict[str, float] = {}
    for name, value in rewards.items():
        try:
            numbers |= {} if value is None else {str(name): float(value)}
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path}: verifier_result.rewards.{name} is no number ({in_one_line(error)}): correct it, or move the "
                "file"
            ) from None
    return numbers


def _ratings(url: str) -> dict[str, float]:
    ratings: dict[str, float] = {}
    for where, row in read(url):
        score = _score(row, where)
        if not isinstance(row.get("id"), str) or score is None:
            raise UserError(
                f"{where}: ratings are rows of id and score (or rating); there are {in_one_line(', '.join(row))}"
            )
        ratings[row["id"]] = score
    return ratings


def _score(row: Mapping[str, Any], where: str) -> float | None:
    column = next((name for name in SCORES if row.get(name) is not None), None)
    if column is None:
        return None
    value = row[column]
    with suppress(ValueError):
        value = json.loads(value.lower()) if isinstance(value, str) else value  # CSV values are text
    if not isinstance(value, int | float):
        raise UserError(f"{where}: {column} is {row[column]!r:.60}: write a number, or true and false")
    return float(value)
