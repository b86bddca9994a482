"""Agents' trajectories as files of ATIF, Harbor's Agent Trajectory Interchange Format (its RFC 0001), out and in.

A file holds one trajectory: steps with the messages and, for each answer of the policy, the tokens that it read and
drew. Further conversations of an agent's trajectory are its `subagent_trajectories`. ATIF has no field for rewards and
advantages, so these are in `extra`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ratchet.infra.runs.joined_rows import SPLITS, JoinedRows
from ratchet.infra.runs.run import Run
from ratchet.rlhf.config.published import published_text
from ratchet.rlhf.errors import UserError, in_one_line
from ratchet.rlhf.models.model_folders import hub_name
from ratchet.rlhf.schema import branch_id, parts_of, trajectory_of

VERSION = "ATIF-v1.7"
"""The version that is written: the first with `subagent_trajectories`. All versions 1.x are read."""
CONVERSATIONS = (
    "subagent_trajectories are the further conversations of the same agent with the same policy; all share the reward."
)
ENVIRONMENT = "environment"
"""Role of what an agent observed without calling a tool."""
Chat = list[dict[str, Any]]
"""Messages as OpenAI defines them, and those of the role `ENVIRONMENT`."""


# Out.


def export_trajectories(run: Run, folder: Path, iteration: int | None = None) -> int:
    """Writes a file for each trajectory of the closed iterations, or of one of them; returns their number.

    Args:
        folder: an existing folder. The name of a file is the trajectory's id.

    Raises:
        UserError: the run is a fit, or the iteration is not closed.
        Corrupt: an object of the run is missing or damaged.
    """
    if run.is_fit:
        raise UserError(f"{run.store.url} is a fit, which has no trajectories: name a run of iterations")
    joined, agent = JoinedRows(run), _agent(run)
    name, closed = run.store.url.rpartition("/")[2], range(run.state.iteration)
    if iteration is not None and iteration not in closed:
        raise UserError(f"{run.store.url}: iteration {iteration} is not closed: choose one of 0 to {closed[-1]}")
    count = 0
    for number in closed if iteration is None else (iteration,):
        table = joined.table(number, SPLITS[0])
        rows = [] if table is None else table.to_pylist()
        for identity, conversations in groupby(rows, key=lambda row: trajectory_of(row["trajectory_id"])):
            text = json.dumps(document(list(conversations), agent, name))
            (folder / f"{identity}.json").write_text(f"{text}\n")
            count += 1
    return count


def _agent(run: Run) -> dict[str, str]:
    """Describes the agent. The options of its program are left out: they may hold secrets."""
    partner, model, trainer = run.config.rollout.partner, run.config.model, run.trainer
    known = {"model_name": hub_name(model) or Path(model.path).name} if run.config.knows_model else {}
    if trainer is not None:
        return {"name": trainer, "version": "unknown", **known}
    return {
        "name": "ratchet" if partner is None else published_text(partner.name),
        "version": version("ratchet-rlhf"),
        **known,
    }


def document(rows: Sequence[Mapping[str, Any]], agent: Mapping[str, str], run: str) -> dict[str, Any]:
    """Returns a trajectory as ATIF.

    Args:
        rows: its conversations, each with the columns of the stages.
        agent: name, version and, if it is known, model_name.
        run: name of the run.
    """
    first, *others = (_conversation(row, agent, run) for row in rows)
    return first | ({"notes": CONVERSATIONS, "subagent_trajectories": others} if others else {})


def _conversation(row: Mapping[str, Any], agent: Mapping[str, Any], run: str) -> dict[str, Any]:
    tools: list[Any] = []
    steps: list[dict[str, Any]] = []
    ids = row["response_ids"]  # null where another trainer has not written them
    spans = [] if ids is None else _spans(row)
    for number, (asked, answer, started) in enumerate(_exchanges(row)):
        tools = tools or asked.get("tools", [])
        for message in asked["messages"]:
            step = _add_step(steps, message)
            if message["role"] == "assistant":  # the program or the dataset wrote it
                step["is_copied_context"] = True
        if answer is not None:
            step = _add_step(steps, answer)
            step |= {} if started is None else {"timestamp": datetime.fromtimestamp(started, UTC).isoformat()}
            step["llm_call_count"] = 1
            if ids is not None:
                # an error may have ended the last turn before its first token
                span = spans[number] if number < len(spans) else range(len(ids), len(ids))
                step["metrics"] = _metrics(row, span, number)
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    totals = {
        f"total_{name}": sum(each[name] for each in metrics)
        for name in ("prompt_tokens", "completion_tokens")
        if metrics and all(name in each for each in metrics)
    }
    reward = {} if row.get("score") is None else {"reward": row["score"]}
    return {
        "schema_version": VERSION,
        "session_id": f"{run}/{trajectory_of(row['trajectory_id'])}",
        "trajectory_id": row["trajectory_id"],
        "agent": {**agent, **({"tool_definitions": tools} if tools else {})},
        "steps": steps,
        "final_metrics": {**totals, "total_steps": len(steps)},
        "extra": {**reward, "ratchet": {"run": run, **_facts(row, spans)}},
    }


def _facts(row: Mapping[str, Any], spans: Sequence[range]) -> dict[str, Any]:
    """Returns what ATIF has no field for."""
    names = ("iteration", "prompt_id", "sample", "data_source", "policy_version", "finish_reason", "replayed_from")
    facts = {name: row.get(name) for name in (*names, "ground_truth", "rollout_error", "tool_error", "reward_error")}
    if row.get("ground_truth_is_json"):
        facts["ground_truth"] = json.loads(row["ground_truth"])
    facts["reward_parts"] = parts_of(row.get("reward_parts")) or None
    # what the environment said after the last answer
    facts["last_token_ids"] = (row["response_ids"] or [])[spans[-1].stop if spans else 0 :] or None
    return {name: value for name, value in facts.items() if value is not None}


def _spans(row: Mapping[str, Any]) -> list[range]:
    """Returns the positions of each answer's tokens in the response."""
    if row.get("calls"):
        return [range(call["start"], call["end"]) for call in row["calls"]]
    mask, spans, at = row["response_mask"], list[range](), 0
    for end in [len(mask)] if row.get("turn_ends") is None else row["turn_ends"]:
        spans.append(range(next((place for place in range(at, end) if mask[place]), end), end))
        at = end
    # the last turn has no end if an error cut it off
    return [*spans, range(mask.index(1, at), len(mask))] if 1 in mask[at:] else spans


def _exchanges(row: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None, float | None]]:
    """Yields what the policy was asked, its answer, and the time of an agent's call."""
    if row.get("calls"):
        for call in row["calls"]:
            asked = json.loads(call["asked"])
            if "prompt" in asked:  # the policy continued a text, or tokens, which are in the metrics of its answer
                text = asked["prompt"] if isinstance(asked["prompt"], str) else ""
                asked = {"messages": [{"role": "user", "content": text}]}
            yield asked, json.loads(call["answer"]), call["started"]
        return
    heard: Chat = json.loads(row["messages"] or "[]")
    tools = json.loads(row["tools"]) if row.get("tools") else []
    is_answered = row.get("calls") is None  # an agent's program may fail before its first call
    for turn in (row.get("turns") or [{"role": "policy", "content": row["response"]}]) if is_answered else ():
        if turn["role"] == "policy":
            yield {"messages": heard, "tools": tools}, {"role": "assistant", "content": turn["content"]}, None
            heard = []
        else:
            heard = [{"role": ENVIRONMENT, "content": turn["content"]}]
    if heard:
        yield {"messages": heard}, None, None


def _add_step(steps: list[dict[str, Any]], message: Mapping[str, Any]) -> dict[str, Any]:
    """Appends a message as a step, or as an observation of the last one; returns the step."""
    role, text = message["role"], message.get("content") or ""
    if role in ("tool", ENVIRONMENT) and steps and steps[-1]["source"] == "agent":
        known = {call["tool_call_id"] for call in steps[-1].get("tool_calls", ())}
        call = message.get("tool_call_id")
        result = {"content": text} | ({"source_call_id": call} if call in known else {})
        steps[-1].setdefault("observation", {"results": []})["results"].append(result)
        return steps[-1]
    source = "agent" if role == "assistant" else "system" if role in ("system", "developer") else "user"
    step: dict[str, Any] = {"step_id": len(steps) + 1, "source": source, "message": text}
    if message.get("reasoning_content"):
        step["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        step["tool_calls"] = [_tool_call(call, number) for number, call in enumerate(message["tool_calls"])]
    steps.append(step)
    return step


def _tool_call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    function = call["function"]
    written = arguments = function["arguments"]
    if isinstance(written, str):
        try:
            arguments = json.loads(written)
        except (ValueError, RecursionError):
            arguments = None
    is_object = isinstance(arguments, dict)
    return {
        "tool_call_id": call.get("id") or f"call-{number}",
        "function_name": function["name"],
        "arguments": arguments if is_object else {},
    } | ({} if is_object else {"extra": {"arguments": written}})


def _metrics(row: Mapping[str, Any], span: range, number: int) -> dict[str, Any]:
    """Returns the tokens of an answer; `number` is the answer's."""
    place = slice(span.start, span.stop)
    drawn = row["response_ids"][place]
    extra = {
        name: row[name][place] for name in ("token_versions", "advantages", "loss_mask") if row.get(name) is not None
    }
    if number < len(row.get("turn_rewards") or ()):
        extra["turn_reward"] = row["turn_rewards"][number]
    metrics: dict[str, Any] = {"completion_tokens": len(drawn), "completion_token_ids": drawn}
    if row.get("prompt_ids") is not None:
        prompt = [*row["prompt_ids"], *row["response_ids"][: span.start]]
        metrics = {"prompt_tokens": len(prompt), "prompt_token_ids": prompt, **metrics}
    if row.get("rollout_log_probs") is not None and not row.get("by_expert"):  # an expert's are unknown
        metrics["logprobs"] = row["rollout_log_probs"][place]
    return metrics | ({"extra": extra} if extra else {})


# In.


def is_atif(row: Mapping[str, Any]) -> bool:
    """Returns True if a JSON object calls itself ATIF."""
    return str(row.get("schema_version")).startswith("ATIF-")


def conversations(tree: Mapping[str, Any], where: str, name: str) -> list[dict[str, Any]]:
    """Reads a trajectory.

    Args:
        tree: the JSON object.
        where: its place, for errors.
        name: an id, if it has none.

    Returns:
        A row for each conversation of answers with tokens, with the keys of `ingest.TRAJECTORIES`, except those that
        name the source. A conversation without tokens has those of its texts, and the messages before its last answer;
        its `text_calls` are what `calls` would be, and its `chat` are all of its messages. There are also the prompt's
        `ground_truth`, and `is_whole`, which is False if an error ended the trajectory.

    Raises:
        UserError: it is not ATIF; the message has a line for each mistake.
    """
    try:
        root = _Trajectory.model_validate(tree)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        raise UserError("\n".join(_explained(mistake, where) for mistake in mistakes)) from None
    name = root.trajectory_id or root.session_id or name
    rows = list(root.rows(name, root.extra.reward))
    for number, other in enumerate(root.all_subagents(), 1):
        reward = root.extra.reward if other.extra.reward is None else other.extra.reward
        rows += other.rows(other.trajectory_id or branch_id(name, number), reward)
    return rows


def _explained(mistake: Any, where: str) -> str:
    place, names = where, list[str]()
    for part, following in zip(mistake["loc"], [*mistake["loc"][1:], ""], strict=True):
        if part == "steps" and isinstance(following, int):
            place += f": step {following + 1}"
        elif isinstance(part, int):
            if names:
                names[-1] += f"[{part}]"
        elif part == "subagent_trajectories" and isinstance(following, int):
            place += f": subagent {following + 1}"
        else:
            names.append(str(part))
    said = mistake["msg"].removeprefix("Value error, ")
    found = f", and is {mistake['input']!r:.60}" if mistake["type"] != "missing" and "should" in said else ""
    place += f"{': ' if place == where else ', '}{'.'.join(names)}" if names else ""
    return in_one_line(f"{place}: {said[0].lower()}{said[1:]}{found}")


def _text(value: Any) -> Any:
    """Joins the parts of a content. Images and audio are no text."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise PydanticCustomError(
                "no_text", "holds {kind}, and models see text only: leave the trajectory out", {"kind": f"{kind!r:.40}"}
            )
    return "\n".join(part["text"] for part in value)


def _reward(value: Any) -> Any:
    """Takes a number; another program may keep something else in `extra.reward`."""
    return float(value) if isinstance(value, bool | int | float) else None


def _seconds(value: Any) -> Any:
    """Takes a time of ISO 8601 as seconds since 1970; another program may write something else."""
    try:
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


class _Part(BaseModel):
    """A part of a trajectory; fields of later versions are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


Text = Annotated[str, BeforeValidator(_text)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[float, Field(allow_inf_nan=False, ge=-3e38, le=3e38)]
"""A number that fits into float32."""


class _ToolCall(_Part):
    tool_call_id: str
    function_name: str
    arguments: dict[str, JsonValue]

    @property
    def as_message(self) -> dict[str, Any]:
        function = {"name": self.function_name, "arguments": json.dumps(self.arguments)}
        return {"id": self.tool_call_id, "type": "function", "function": function}


class _Result(_Part):
    source_call_id: str | None = None
    content: Annotated[str | None, BeforeValidator(_text)] = None

    @property
    def message(self) -> dict[str, Any]:
        text = self.content or ""
        if self.source_call_id is None:
            return {"role": ENVIRONMENT, "content": text}
        return {"role": "tool", "tool_call_id": self.source_call_id, "content": text}


class _Observation(_Part):
    results: list[_Result]


class _Metrics(_Part):
    prompt_token_ids: list[TokenId] | None = None
    completion_token_ids: list[TokenId] | None = None
    logprobs: list[Number] | None = None

    @model_validator(mode="after")
    def _has_a_log_prob_for_each_token(self) -> Self:
        if self.logprobs is not None and self.completion_token_ids is not None:
            numbers, tokens = len(self.logprobs), len(self.completion_token_ids)
            if numbers != tokens:
                raise ValueError(
                    f"logprobs has {numbers} numbers, and completion_token_ids {tokens}: write one for each token, or "
                    "leave logprobs out"
                )
        return self


class _Step(_Part):
    source: Literal["system", "user", "agent"]
    message: Text
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    timestamp: Annotated[float | None, BeforeValidator(_seconds)] = None

    @property
    def is_answer(self) -> bool:
        """True if the model wrote it in this trajectory."""
        return self.source == "agent" and not self.is_copied_context and self.llm_call_count != 0

    @property
    def tokens(self) -> _Metrics | None:
        """The tokens of an answer that one call of the model drew; None: they are unknown, or of another trajectory."""
        metrics = self.metrics
        if not self.is_answer or self.llm_call_count not in (None, 1) or metrics is None:
            return None
        return metrics if metrics.prompt_token_ids and metrics.completion_token_ids else None

    @property
    def own_message(self) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": {"agent": "assistant"}.get(self.source, self.source),
            "content": self.message,
        }
        message |= {"reasoning_content": self.reasoning_content} if self.reasoning_content else {}
        return message | ({"tool_calls": [call.as_message for call in self.tool_calls]} if self.tool_calls else {})


class _Facts(_Part):
    """What an export of this project adds."""

    data_source: str | None = None
    policy_version: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    finish_reason: str | None = None
    ground_truth: JsonValue = None
    rollout_error: str | None = None
    reward_parts: dict[str, Number] = {}
    last_token_ids: list[TokenId] = []


class _Extra(_Part):
    reward: Annotated[Number | None, BeforeValidator(_reward)] = None
    ratchet: _Facts = _Facts()


class _Agent(_Part):
    tool_definitions: list[dict[str, JsonValue]] | None = None


class _Trajectory(_Part):
    schema_version: Annotated[str, Field(pattern=r"^ATIF-v1\.\d+$")]
    trajectory_id: str | None = None
    session_id: str | None = None
    agent: _Agent
    steps: Annotated[list[_Step], Field(min_length=1)]
    extra: Annotated[_Extra, BeforeValidator(lambda value: {} if value is None else value)] = _Extra()
    subagent_trajectories: list[_Trajectory] | None = None

    def all_subagents(self) -> Iterator[_Trajectory]:
        """Yields the embedded trajectories, at any depth."""
        for other in self.subagent_trajectories or ():
            yield other
            yield from other.all_subagents()

    @property
    def text_calls(self) -> list[dict[str, Any]]:
        """The answers in the form of the column `calls`, without tokens."""
        calls, heard = list[dict[str, Any]](), Chat()
        for step in self.steps:
            if step.is_answer:
                tools = () if calls else self.agent.tool_definitions or ()
                calls.append(_call(heard, tools, step.own_message, range(0), step.timestamp))
                heard = []
            else:
                heard.append(step.own_message)
            heard += [result.message for result in step.observation.results] if step.observation is not None else ()
        return calls

    def rows(self, name: str, reward: float | None) -> Iterator[dict[str, Any]]:
        """Yields the conversations, by the tokens of the answers, or else by their texts."""
        tools, facts = self.agent.tool_definitions or [], self.extra.ratchet
        drawn, history = list[_Drawn](), Chat()
        for step in self.steps:
            if (tokens := step.tokens) is not None:
                # an agent that edited its conversation, or a chat template that did, begins another one
                if not drawn or not drawn[-1].goes_on(tokens):
                    drawn.append(_Drawn(tokens.prompt_token_ids or [], tools))
                    drawn[-1].heard = list(history)
                drawn[-1].add(tokens, step.own_message, step.timestamp)
            elif drawn:
                drawn[-1].heard.append(step.own_message)
            history.append(step.own_message)
            for result in step.observation.results if step.observation is not None else ():
                history.append(result.message)
                if drawn:
                    drawn[-1].heard.append(result.message)
        shared = {
            "score": reward,
            "data_source": facts.data_source,
            "policy_version": facts.policy_version,
            "finish_reason": facts.finish_reason,
            "reward_parts": list(facts.reward_parts.items()) or None,
            "ground_truth": facts.ground_truth,
            "is_whole": facts.rollout_error is None,
        }
        if drawn:
            drawn[-1].hear(facts.last_token_ids)
        for number, conversation in enumerate(drawn):
            is_whole = facts.finish_reason != "length"
            yield {"id": branch_id(name, number), **shared, **conversation.row(is_whole=is_whole)}
        if not drawn:
            answers = [place for place, message in enumerate(history) if message["role"] == "assistant"]
            last = answers[-1] if answers else len(history)
            texts = _texts(history[:last], history[last : last + 1], tools)
            yield {"id": name, **shared, **texts, "text_calls": self.text_calls, "chat": history}


def _texts(asked: Chat, answers: Chat, tools: Sequence[object]) -> dict[str, Any]:
    """Returns the prompt, or None if it has calls of tools; and the response if it is one text without tools."""
    messages = [
        {"role": "user" if message["role"] == ENVIRONMENT else message["role"], "content": message["content"]}
        for message in asked
    ]
    prompt = messages if messages and all(map(_is_plain, asked)) else None
    is_text = prompt is not None and not tools and len(answers) == 1 and _is_plain(answers[0])
    return {"prompt": prompt, "response": answers[0]["content"] if is_text else None}


def _call(
    heard: Chat, tools: Sequence[object], answer: dict[str, Any], span: range, started: float | None
) -> dict[str, Any]:
    asked = {"messages": heard, **({"tools": tools} if tools else {})}
    texts = {"asked": json.dumps(asked, ensure_ascii=False), "answer": json.dumps(answer, ensure_ascii=False)}
    return {**texts, "start": span.start, "end": span.stop, "started": started, "seconds": None}


def _is_plain(message: Mapping[str, Any]) -> bool:
    return message.keys() == {"role", "content"}


@dataclass
class _Drawn:
    """A conversation whose answers have tokens."""

    prompt_ids: list[int]
    tools: Sequence[Mapping[str, Any]]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] | None = field(default_factory=list)
    """None: those of an answer are unknown."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    heard: Chat = field(default_factory=list)
    """Messages since the last answer."""
    first: Chat = field(default_factory=list)
    """Messages before the first answer."""

    def goes_on(self, tokens: _Metrics) -> bool:
        """Returns True if an answer continues this conversation."""
        known = [*self.prompt_ids, *self.ids]
        return (tokens.prompt_token_ids or [])[: len(known)] == known

    def add(self, tokens: _Metrics, message: dict[str, Any], started: float | None) -> None:
        """Appends an answer and what was read before it."""
        self.hear((tokens.prompt_token_ids or [])[len(self.prompt_ids) + len(self.ids) :])
        tools = () if self.calls else self.tools
        if not self.calls:
            self.first = self.heard
        drawn, start = tokens.completion_token_ids or [], len(self.ids)
        self.ids += drawn
        self.mask += [1] * len(drawn)
        self.log_probs = None if self.log_probs is None or tokens.logprobs is None else self.log_probs + tokens.logprobs
        self.calls.append(_call(self.heard, tools, message, range(start, len(self.ids)), started))
        self.heard = []

    def hear(self, ids: Sequence[int]) -> None:
        """Appends tokens that the model did not draw."""
        self.ids += ids
        self.mask += [0] * len(ids)
        self.log_probs = None if self.log_probs is None else self.log_probs + [0.0] * len(ids)

    def row(self, *, is_whole: bool) -> dict[str, Any]:
        """Returns the columns; `is_whole` is False if the last answer was cut off, which no text could say."""
        answers = [json.loads(call["answer"]) for call in self.calls] if is_whole and all(self.mask) else []
        return {
            **_texts(self.first, answers, self.tools),
            "prompt_ids": self.prompt_ids,
            "response_ids": self.ids,
            "rollout_log_probs": self.log_probs,
            "response_mask": self.mask,
            "calls": self.calls,
        }
