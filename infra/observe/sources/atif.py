"""Agents' trajectories: the jobs of Harbor, each of which is a step, or a folder of ATIF files, which are one step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ratchet.infra.observe.sources.source import Content, Unit, content_of, others
from ratchet.infra.progress import note
from ratchet.infra.runs.atif import ENVIRONMENT, conversations, is_atif
from ratchet.infra.runs.ingest import HARBOR, read_trial, rewards_of_trial
from ratchet.rlhf.agents.transcripts import content_text
from ratchet.rlhf.data.files import digest, open_rows
from ratchet.rlhf.errors import UserError, in_one_line

IN_COLUMNS = {
    *("task_name", "trial_name", "agent_info", "agent_result", "verifier_result", "exception_info", "source"),
    *("started_at", "step_results"),
}
"""Fields of a trial's result that columns keep."""
NOT_KEPT = ("schema_version of trajectories", "timestamp of steps", "source of steps, which is a role of messages")
PARTS_OF_A_TRIAL = ("agent", "steps", "verifier", "trial.log")
"""Folders and files that only the folder of a trial has."""


class ATIF:
    """Trajectories of agents."""

    def __init__(self, path: Path) -> None:
        """Takes the files.

        Args:
            path: a job of Harbor, or a folder of jobs; a trial; or a file of ATIF or a folder of them (``.json`` with a
                trajectory, or ``.jsonl`` with one per line).

        Raises:
            UserError: there are no such files.
        """
        self._path = path
        self._running: set[Path] = set()
        """Jobs of which a note has said that they are left out."""
        jobs = self._jobs()
        if not jobs and not self._files():
            raise UserError(f"{path}: there are neither trials of Harbor nor files of ATIF (.json, .jsonl)")
        self.trainer = "harbor" if jobs else "atif"
        configs = {job.name: config for job in jobs if (config := _config(job))}
        self.config: Mapping[str, Any] = next(iter(configs.values())) if len(configs) == 1 else configs
        self.model: str | None = None

    def units(self) -> Iterator[Unit]:
        """See `Source.units`. A job that has not ended is left out, and so is a trial without its result."""
        if files := self._files():
            yield Unit(0, _digest(files, self._path), str(self._path), partial(_read_files, files, self._path))
        for number, (job, trials) in enumerate(self._jobs().items()):
            if (job / HARBOR).is_file() and job not in trials and read_trial(job / HARBOR).get("finished_at") is None:
                if job not in self._running:
                    note(f"{job} has not ended, and is left out (`harbor job resume` continues it)")
                    self._running.add(job)
                return  # those after it keep their numbers
            ended = [trial for trial in trials if (trial / HARBOR).is_file()]
            if ended:
                files = [file for trial in ended for file in (trial / HARBOR, *_trajectories(trial))]
                yield Unit(number, _digest(files, job), str(job), partial(_read_job, ended, job))

    def _jobs(self) -> dict[Path, list[Path]]:
        """Returns the trials of each job, in order of name."""
        if not self._path.is_dir():
            return {}
        if _is_trial(self._path):
            return {self._path: [self._path]}
        if trials := _trials(self._path):
            return {self._path: trials}
        return {job: trials for job in sorted(self._path.iterdir()) if job.is_dir() and (trials := _trials(job))}

    def _files(self) -> list[Path]:
        if not self._path.is_dir():
            return [self._path]
        if self._jobs():
            return []
        return sorted(file for file in self._path.iterdir() if file.suffix in (".json", ".jsonl"))


def _is_trial(folder: Path) -> bool:
    return any((folder / name).exists() for name in PARTS_OF_A_TRIAL)


def _trials(job: Path) -> list[Path]:
    return sorted(folder for folder in job.iterdir() if folder.is_dir() and _is_trial(folder))


def _config(job: Path) -> Mapping[str, Any]:
    file = job / "config.json"
    return read_trial(file) if file.is_file() else {}


def _trajectories(trial: Path) -> list[Path]:
    """Returns the files of a trial's conversations: those of its agent, or of its agents of each step."""
    agents = [trial / "agent"] if (trial / "agent").is_dir() else sorted((trial / "steps").glob("*/agent"))
    found = chain.from_iterable((agent / "trajectory.json", *_continued(agent)) for agent in agents)
    return [file for file in found if file.is_file()]


def _continued(agent: Path) -> list[Path]:
    return sorted(agent.glob("trajectory.cont-*.json"), key=lambda file: (len(file.name), file.name))


def _digest(files: list[Path], below: Path) -> str:
    named = "\n".join(
        f"{file.relative_to(below) if file != below else file.name} {digest(str(file))}" for file in files
    )
    return hashlib.sha256(named.encode()).hexdigest()


def _read_files(files: list[Path], path: Path) -> Content:
    columns: list[dict[str, Any]] = []
    for file in files:
        for where, tree in open_rows(str(file)):
            name = path.stem if path.is_dir() else file.stem
            for number, row in enumerate(_rows(tree, where)):
                columns.append({"data_source": name, **row, "branch": number})
    if any("score" in row for row in columns):
        columns = [row if "score" in row else row | {"reward_error": "the file has no reward"} for row in columns]
    content = content_of(columns, [])
    content.left_out = NOT_KEPT
    return content


def _read_job(trials: list[Path], job: Path) -> Content:
    columns: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for _, of_trial, source in sorted(map(_read_trial, trials), key=lambda read: read[0]):
        columns += of_trial
        rest += [source] * len(of_trial)
    content = content_of(columns, rest)
    content.left_out = NOT_KEPT
    if (job / HARBOR).is_file() and job not in trials:
        content.left_out += (f"finished_at and other fields of the job's {HARBOR}",)
    return content


def _read_trial(folder: Path) -> tuple[tuple[str, ...], list[dict[str, Any]], dict[str, Any]]:
    """Returns the place of a trial among those of its job, its rows, and what no column takes."""
    file = folder / HARBOR
    trial = read_trial(file)
    agent, used = _object(trial, "agent_info"), _object(trial, "agent_result")
    model = _object(agent, "model_info").get("name")
    task, name = str(trial.get("task_name")), str(trial.get("trial_name") or folder.name)
    source = {
        "source_trial": name,
        "source_task": task,
        "source_agent": agent.get("name"),
        "source_agent_version": agent.get("version"),
        "source_model": model,
        "source_started": trial.get("started_at"),
        "source_input_tokens": used.get("n_input_tokens"),
        "source_output_tokens": used.get("n_output_tokens"),
        "source_cost_usd": used.get("cost_usd"),
        **others({name: value for name, value in trial.items() if name not in IN_COLUMNS and value is not None}),
    }
    errors = [trial.get("exception_info")] + [step.get("exception_info") for step in trial.get("step_results") or ()]
    failed = next((_failure(error) for error in errors if error), None)
    shared: dict[str, Any] = {
        "prompt_id": json.dumps([task, trial.get("task_checksum"), agent.get("name"), model]),
        "data_source": trial.get("source") or "harbor",
        **({"rollout_error": failed, "finish_reason": "error"} if failed else {}),
    }
    rewards = rewards_of_trial(trial, file)
    score = rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else None)
    parts = {"reward_parts": rewards} if rewards else {}
    why = "there are several rewards, and none is called reward" if rewards else failed or "there is no reward"
    scored = parts | ({"reward_error": why} if score is None else {"score": score})
    conversed = [
        row for path in _trajectories(folder) for where, tree in open_rows(str(path)) for row in _rows(tree, where)
    ]
    rows = [{**row, **shared, **scored, "branch": number} for number, row in enumerate(conversed or [{"response": ""}])]
    return (task, str(trial.get("started_at")), name), rows, source


def _object(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = tree.get(name)
    return value if isinstance(value, Mapping) else {}


def _failure(error: Mapping[str, Any]) -> str:
    return in_one_line(f"{error.get('exception_type')}: {error.get('exception_message')}")


def _rows(tree: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Yields the conversations of a trajectory as columns."""
    if not is_atif(tree):
        raise UserError(f"{where}: this is no ATIF, which has a schema_version such as ATIF-v1.8")
    for row in conversations(_in_words(tree), where, ""):
        calls = row["calls"] if "calls" in row else row["text_calls"]
        asked = [json.loads(call["asked"]) for call in calls]
        heard = asked[0]["messages"] if asked else row["chat"]
        said = [content_text(json.loads(call["answer"])) for call in calls]
        between = [[content_text(message) for message in each["messages"]] for each in asked[1:]]
        told = [text for answer, texts in zip(said, [*between, []], strict=True) for text in (answer, *texts)]
        tools = asked[0].get("tools") if asked else None
        columns = {
            "messages": [
                {"role": "user" if message["role"] == ENVIRONMENT else message["role"], **_content(message)}
                for message in heard
            ],
            "tools": tools or None,
            "response": row["response"] if row["response"] is not None else "\n".join(told),
            "calls": calls,
        }
        names = (
            *("prompt_ids", "response_ids", "rollout_log_probs", "response_mask", "finish_reason", "policy_version"),
            *("ground_truth", "data_source", "score"),
        )
        columns |= {name: row.get(name) for name in names}
        columns["reward_parts"] = dict(row["reward_parts"] or ())
        yield {name: value for name, value in columns.items() if value not in (None, {})}


def _content(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "role"}


def _in_words(value: Any) -> Any:
    """Copies a trajectory with a text in place of each image and sound."""
    if isinstance(value, list):
        return [_in_words(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    if value.get("type") in ("image", "audio") and isinstance(source := value.get("source"), Mapping):
        return {"type": "text", "text": f"[{value['type']}: {source.get('path')}]"}
    return {name: _in_words(inner) for name, inner in value.items()}
