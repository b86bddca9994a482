"""Prompts that continue stored trajectories after one of their turns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow.compute as pc

from ratchet.infra.runs.run import Run
from ratchet.infra.store.images import Images
from ratchet.rlhf.data.images import data_url
from ratchet.rlhf.data.prompts import original, stored_chat, structures
from ratchet.rlhf.environments.dialogues import CONTINUED
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import IMAGES, TURN_IMAGES, prompt_images

COLUMNS = (
    "trajectory_id",
    "data_source",
    "messages",
    "tools",
    "prompt_is_text",
    "ground_truth",
    "ground_truth_is_json",
    "extra_info",
    "response_ids",
    IMAGES,
    *CONTINUED,
    "turn_states",
)


def turn_prefixes(run: Run, trajectory_id: str, turn: int | None) -> list[dict[str, Any]]:
    """Returns rows of a prompt dataset whose prompts are continued after stored turns, with the stored tokens.

    Args:
        trajectory_id: a trajectory of the run.
        turn: number of the policy's turns to keep; None: one row for each number that leaves a turn to write.

    Returns:
        Rows with a prompt, a ground truth and `extra_info` as in the run's dataset, and `continues`: a trajectory up to
        the end of the environment's answer to that turn, which `Prompt.continues` describes.

    Raises:
        UserError: the trajectory is not there, has no turns, or fewer than `turn`.
    """
    row = _row(run, trajectory_id)
    if run.config.rollout.environment is None or row["turn_ends"] is None:
        raise UserError(f"{run.store.url} has no rollout.environment: only turns with an environment can be continued")
    if row["response_ids"] is None:
        raise UserError(f"{trajectory_id} is stored without its tokens (response_ids), which are what is continued")
    most = len(row["turn_ends"]) - 1
    if turn is not None and not 1 <= turn <= most:
        raise UserError(
            f"{trajectory_id} has {most + 1} turns of the policy: keep 1 to {most} of them (--turn)"
            if most
            else f"{trajectory_id} has one turn of the policy: there is nothing between turns to continue from"
        )
    return list(_rows(run, row, range(1, most + 1) if turn is None else [turn]))


def iteration_of(trajectory_id: str) -> int:
    """Returns the iteration that the id of a trajectory names; -1 if it names none."""
    number = trajectory_id[2:8]
    return int(number) if trajectory_id.startswith("it") and number.isdecimal() else -1


def _row(run: Run, trajectory_id: str) -> Mapping[str, Any]:
    """Reads a trajectory, of the iteration that its id names."""
    number = iteration_of(trajectory_id)
    if 0 <= number <= max([run.state.iteration, *run.state.ahead]):
        for shard in run.store.shards_of(run.store.iteration_state(number), "generate"):
            rows = run.store.read_shard(shard, COLUMNS)
            found = rows.filter(pc.equal(rows["trajectory_id"], trajectory_id)).to_pylist()
            if found:
                row: Mapping[str, Any] = found[0]
                return row
    raise UserError(f"{run.store.url} has no trajectory {trajectory_id}: `ratchet show` lists them")


def _asked(run: Run, messages: str, is_text: bool) -> dict[str, Any]:
    """Returns the columns of the prompt: where its messages name images, also these, as data: URLs."""
    prompt: Any = original(messages, is_text)
    digests = [digest for message in json.loads(messages) for digest in message.get("images", ())]
    if not digests:
        return {"prompt": prompt}
    if not isinstance(prompt, str):
        prompt = [{name: value for name, value in message.items() if name != "images"} for message in prompt]
    return {"prompt": prompt, "images": _data_urls(run, digests)}


def _data_urls(run: Run, digests: Iterable[str]) -> list[str]:
    images = Images(run.store.objects)
    return [data_url(images.get(digest)) for digest in digests]


def _rows(run: Run, row: Mapping[str, Any], turns: Iterable[int]) -> Iterator[dict[str, Any]]:
    chat = stored_chat(row["messages"], row["tools"])
    truth, extra = structures(row["ground_truth"], row["ground_truth_is_json"], row["extra_info"])
    for turn in turns:
        end = row["turn_starts"][turn]
        prefix: dict[str, Any] = {name: (row[name] or [])[:turn] for name in CONTINUED}
        heard = (row[IMAGES] or [])[len(prompt_images(row[IMAGES], row[TURN_IMAGES])) :][: sum(prefix[TURN_IMAGES])]
        prefix |= {"states": (row["turn_states"] or [])[:turn], "images": _data_urls(run, heard)}
        yield {
            "data_source": row["data_source"],
            **_asked(run, row["messages"], row["prompt_is_text"]),
            **({"tools": list(chat.tools)} if chat.tools else {}),
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": extra,
            "continues": {"trajectory_id": row["trajectory_id"], "ids": row["response_ids"][:end], **prefix},
        }
