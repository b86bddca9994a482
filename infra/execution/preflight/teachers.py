"""Checks the teachers of a run: their vocabularies, and the servers that compute some of them."""

from __future__ import annotations

from functools import partial

from ratchet.infra.execution.preflight.mistakes import check_all
from ratchet.infra.progress import note
from ratchet.rlhf.config import ModelConfig, RunConfig, TeacherConfig
from ratchet.rlhf.config.sections import OneTeacher
from ratchet.rlhf.data.prompts import PromptDataset
from ratchet.rlhf.errors import EngineLost, UserError
from ratchet.rlhf.models.hf_configs import text_config
from ratchet.rlhf.models.tokenizers import load_tokenizer

SOURCES = 8
"""Largest number of data sources without a teacher that are named at once."""


def check_teachers(student: ModelConfig, teachers: TeacherConfig) -> None:
    """Checks that all teachers have the student's vocabulary, and enough tokens for `teacher.top_k`."""
    check_all(*(partial(_check, key, model, student, teachers.top_k) for key, model in teachers.by_key.items()))


def _check(key: str, teacher: OneTeacher, student: ModelConfig, top_k: int) -> None:
    size = text_config(teacher).vocab_size
    if top_k > size:
        where = "its vocabulary" if key == "teacher" else f"the vocabulary of {key}"
        raise UserError(f"teacher.top_k is {top_k}, more than the {size} tokens of {where}: lower it")
    if teacher.align == "text":
        for named, model in ((key, teacher), ("model", student)):
            if not load_tokenizer(model).is_fast:
                raise UserError(
                    f"{key}.align text needs fast tokenizers, and that of {named}.path {model.path} is none: choose "
                    "another model"
                )
        return
    own, other = (load_tokenizer(model).get_vocab() for model in (student, teacher))
    if differs := next((token for token in own if other.get(token) != own[token]), None):
        raise UserError(
            f"{key} {teacher.path} has another vocabulary than {student.path}: the token {differs!r:.40} is "
            f"{other.get(differs, 'none')} there, and {own[differs]} here: choose a teacher of the same family, or set "
            f"{key}.align=text"
        )


def check_servers(config: RunConfig) -> None:
    """Asks the servers of teachers for what the run will ask them; raises `UserError` if they do not answer it."""
    teachers = {} if config.teacher is None else config.teacher.by_key
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    top_k = 0 if config.teacher is None else config.teacher.top_k
    check_all(*(partial(_check_servers, key, teacher, longest, top_k) for key, teacher in teachers.items()))


def _check_servers(key: str, teacher: OneTeacher, longest: int, top_k: int) -> None:
    if teacher.engine is None:
        return
    from ratchet.rlhf.rollout.scoring_servers import ScoringServers

    servers = ScoringServers(teacher.engine.urls, timeout_s=teacher.engine.timeout_s)
    try:
        served = servers.check(longest, top_k)
    except (UserError, EngineLost) as error:
        raise UserError(f"{key}.engine: {error}") from None
    finally:
        servers.close()
    for url, name in served.items():
        if name.rpartition("/")[2] != teacher.path.rstrip("/").rpartition("/")[2]:
            note(f"{key}.engine: {url} serves {name}, and {key}.path is {teacher.path}")


def check_sources(config: RunConfig) -> None:
    """Raises `UserError` if a prompt of `data.train` has a data source without a teacher."""
    teachers = config.teacher
    if teachers is None or "*" in teachers.by_source:
        return
    missing: dict[str, str] = {}
    for prompt in PromptDataset(config.data.train):
        if teachers.pattern_of(prompt.data_source) is None:
            missing.setdefault(prompt.data_source, prompt.where)
    if missing:
        raise UserError(
            "\n".join(
                f"{where}: data_source {source} has no teacher: add {source} or * to teacher.models"
                for source, where in list(missing.items())[:SOURCES]
            )
        )
