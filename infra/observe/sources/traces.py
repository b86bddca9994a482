"""Episodes and traces of verifiers, one JSON object per line, as verifiers and prime-rl write them.

An episode holds a trace of each agent. A trace is a forest of messages: each path from a root to a leaf is a
conversation, and becomes a row. Conversations of one trace are branches of one trajectory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ratchet.infra.observe.rows import GENERATE, SCORE
from ratchet.infra.observe.sources.messages import text
from ratchet.infra.observe.sources.source import SOURCE, Content, content_of, others
from ratchet.rlhf.data.formats import tools_column
from ratchet.rlhf.errors import UserError

TRACES = "traces.jsonl"
STREAMS = {
    "logprobs": "rollout_log_probs",
    "trainer_logprobs": "old_log_probs",
    "entropies": "entropy",
    "reference_logprobs": "ref_log_probs",
    "advantages": "advantages",
}
"""Fields of messages with a number for each token that the model wrote, and their columns."""
IN_COLUMNS = {"parent", "message", "sampled", "token_ids", "mask", "tools", *STREAMS}
"""Fields of messages that columns hold."""
REASONS = {
    **dict.fromkeys(("max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed"), "length"),
    "max_turns": "turns",
}
"""`finish_reason` by what stopped a trace; others are `stop`."""

Row = tuple[dict[str, Any], dict[str, Any]]
"""Columns of a conversation, and the fields that no column takes."""


def episode_of(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Reads a line: an episode, or, of older versions, a trace alone.

    Raises:
        UserError: it is neither.
    """
    if "traces" in record and "task" in record:
        return dict(record)
    if "nodes" in record and "task" in record:
        info = record.get("info") or {}
        return {
            "id": info.get("episode_id") or record.get("id"),
            "env": {"name": info.get("env_name")},
            "task": record["task"],
            "group": {"id": info.get("group_id")},
            "run": record.get("run"),
            "traces": [record],
        }
    old = " It is of verifiers' old API: import it with --from jsonl and --map." if "example_id" in record else ""
    raise UserError(f"{where}: this is neither an episode nor a trace of verifiers.{old}")


def step_of(episode: Mapping[str, Any]) -> tuple[int, bool]:
    """Returns the step that an episode belongs to, and whether it is a validation: 0 and False if no trainer played it.

    A validation at a step of prime-rl comes before its update, and so belongs to the step before.
    """
    run = episode.get("run") or {}
    work = run.get("work") or run
    is_validation = work.get("step") is not None and work.get("type") == "eval"
    return int(work.get("step") or 0) - is_validation, is_validation


def content_of_episodes(episodes: Iterable[tuple[dict[str, Any], str]], is_validation: bool) -> Content:
    """Makes the rows of a step, or of a validation.

    Args:
        episodes: each with its place, for errors. Of several with the same id, the last one counts.

    Raises:
        UserError: an episode is malformed.
    """
    by_id = {episode.get("id") or where: (episode, where) for episode, where in episodes}
    rows = [row for episode, where in by_id.values() for row in rows_of(episode, where)]
    content = content_of([columns for columns, _ in rows], [rest for _, rest in rows])
    if is_validation:
        unread = [stage for stage in content.stages if stage not in (GENERATE, SCORE, SOURCE)]
        content.left_out = tuple(f"{stage} of validations" for stage in unread)
        for stage in unread:
            del content.stages[stage]
    return content


def rows_of(episode: Mapping[str, Any], where: str) -> list[Row]:
    """Makes a row of each conversation of an episode.

    Raises:
        UserError: the episode is malformed.
    """
    try:
        return list(_rows(episode))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{where}: this is no episode of verifiers ({type(error).__name__}: {error})") from None


def _rows(episode: Mapping[str, Any]) -> Iterator[Row]:
    task, env = episode["task"], episode.get("env") or {}
    group = (episode.get("group") or {}).get("id") or task.get("hash") or task.get("key") or task.get("data")
    policy = ((episode.get("run") or {}).get("work") or {}).get("policy") or {}
    of_episode = {f"episode_{name}": value for name, value in episode.items() if name not in ("task", "traces")}
    agents = {(trace.get("agent") or {}).get("name") for trace in episode["traces"]}
    without = {"nodes": [], "ok": False}  # it failed before an agent began
    for trace in episode["traces"] or [without]:
        asked = trace.get("task") or task
        data = asked.get("data") or {}
        columns = {
            "prompt_id": json.dumps([group, *([trace["agent"]["name"]] if len(agents) > 1 else [])]),
            "data_source": env.get("name") or env.get("id") or None,
            "dataset_row": data.get("idx"),
            "ground_truth": data.get("answer"),
            "extra_info": data,
            "policy_version": policy.get("start"),
            **_outcome(trace, episode),
        }
        rest = of_episode | {f"task_{name}": value for name, value in asked.items() if name != "data"}
        rest |= {name: value for name, value in trace.items() if name not in ("task", "tools", "nodes")}
        for branch, path in enumerate(_paths(trace["nodes"])):
            nodes = [trace["nodes"][place] for place in path]
            unread = [{name: value for name, value in node.items() if name not in IN_COLUMNS} for node in nodes]
            conversation = _messages(path, trace, data) | (_tokens(nodes) if any(map(_ids, nodes)) else {})
            for number, call in enumerate(conversation["calls"]):
                for name, places in (("start", "turn_starts"), ("end", "turn_ends")):
                    call[name] = conversation[places][number] if places in conversation else 0
            yield columns | conversation | {"branch": branch}, others(rest | {"nodes": unread})


def _paths(nodes: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Lists the conversations, in the order of their last messages; an empty one if there are no messages."""
    parents = [node.get("parent") for node in nodes]
    paths = []
    for leaf in set(range(len(nodes))).difference(parents):
        path = [leaf]
        while (parent := parents[path[-1]]) is not None:
            if not 0 <= parent < path[-1]:
                raise ValueError(f"message {path[-1]} follows message {parent}, which is not before it")
            path.append(parent)
        paths.append(path[::-1])
    return sorted(paths, key=lambda path: path[-1]) or [[]]


def _outcome(trace: Mapping[str, Any], episode: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how a trace ended, and its rewards."""
    errors = [*(trace.get("errors") or ()), *(episode.get("errors") or ())]
    failed = f"{errors[-1]['type']}: {errors[-1]['message']}" if errors and not trace.get("ok") else None
    calls, stopped = trace.get("calls") or [], trace.get("stop_condition")
    is_cut = bool(calls) and calls[-1].get("finish_reason") == "length"
    reason = "length" if is_cut else REASONS.get(stopped, "stop") if stopped else None
    rewards = {name: reward for name, reward in (trace.get("rewards") or {}).items() if reward is not None}
    parts = {name: value for name, value in (trace.get("metrics") or {}).items() if value is not None}
    parts |= {name: reward["score"] for name, reward in rewards.items()}
    outcome: dict[str, Any] = {"finish_reason": "error" if failed else reason, "rollout_error": failed}
    if parts:
        outcome["reward_parts"] = {name: float(value) for name, value in parts.items()}
    if rewards or not failed:
        outcome["score"] = float(sum(reward["score"] * reward.get("weight", 1.0) for reward in rewards.values()))
    else:
        outcome["reward_error"] = failed
    return outcome


def _messages(path: Sequence[int], trace: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of a conversation's texts. Calls are without the places of their tokens."""
    nodes = trace["nodes"]
    first = next((place for place, node in enumerate(path) if nodes[node].get("sampled")), len(path))
    tools = [_tool(tool) for tool in trace.get("tools") or ()]
    of_node = {call.get("node"): call for call in trace.get("calls") or ()}
    calls: list[dict[str, Any]] = []
    heard: list[dict[str, Any]] = []
    for node in path:
        message = _openai(nodes[node]["message"])
        if not nodes[node].get("sampled"):
            heard.append(message)
            continue
        time = (of_node.get(node) or {}).get("time") or {}
        asked = {"messages": heard, **({"tools": tools} if tools and not calls else {})}
        calls.append(
            {
                "asked": json.dumps(asked, ensure_ascii=False),
                "answer": json.dumps(message, ensure_ascii=False),
                "started": time.get("start"),
                "seconds": time["end"] - time["start"] if time.get("end") else None,
            }
        )
        heard = []
    turns = [
        {
            "role": "policy" if nodes[node].get("sampled") else "environment",
            "content": text(_openai(nodes[node]["message"])),
        }
        for node in path[first:]
    ]
    return {
        "messages": [_openai(nodes[node]["message"]) for node in path[:first]] or _asked(data),
        "tools": tools_column(tools),
        "response": "\n".join(turn["content"] for turn in turns),
        "turns": turns,
        "calls": calls,
    }


def _tokens(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the columns of a conversation's tokens. The response begins with the first token that the model wrote."""
    ids: list[int] = []
    mask: list[int] = []
    spans: list[tuple[int, int]] = []
    for node in nodes:
        own = _mask(node)
        if node.get("sampled"):
            drawn = [len(ids) + place for place, is_drawn in enumerate(own) if is_drawn]
            end = len(ids) + len(own)
            spans.append((drawn[0], drawn[-1] + 1) if drawn else (end, end))
        ids += _ids(node)
        mask += own
    begin = mask.index(1) if 1 in mask else len(mask)
    columns: dict[str, Any] = {
        "prompt_ids": ids[:begin],
        "response_ids": ids[begin:],
        "response_mask": mask[begin:],
        "turn_starts": [start - begin for start, _ in spans],
        "turn_ends": [end - begin for _, end in spans],
    }
    for name, column in STREAMS.items():
        if any(node.get(name) for node in nodes):
            columns[column] = [value for node in nodes for value in _spread(node, name)][begin:]
    return columns


def _ids(node: Mapping[str, Any]) -> list[int]:
    return list(node.get("token_ids") or ())


def _mask(node: Mapping[str, Any]) -> list[int]:
    ids, mask = _ids(node), [int(is_drawn) for is_drawn in node.get("mask") or ()]
    if mask and len(mask) != len(ids):
        raise ValueError(f"a message has {len(ids)} token_ids, and a mask of {len(mask)}")
    return mask or [0] * len(ids)


def _spread(node: Mapping[str, Any], name: str) -> list[float]:
    """Spreads the numbers of the tokens that the model wrote over all tokens of a message."""
    values = iter(node.get(name) or ())
    return [next(values, 0.0) if is_drawn else 0.0 for is_drawn in _mask(node)]


def _openai(message: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a message as the columns have it: the calls of tools are OpenAI's."""
    calls = [
        {"id": call.get("id"), "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in message.get("tool_calls") or ()
    ]
    return {"content": "", **message, **({"tool_calls": calls} if calls else {})}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _asked(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of a task that no agent has begun."""
    system, prompt = data.get("system_prompt"), data.get("prompt") or data.get("name") or ""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [{"role": "system", "content": system}, *messages] if system else messages
