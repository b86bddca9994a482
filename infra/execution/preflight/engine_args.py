"""Checks arguments that a config passes on to other programs (`args`) against those that the programs have."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

from ratchet.infra.execution.preflight.mistakes import refuse
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.engine_args import unknown
from ratchet.rlhf.config.engines import VLLMConfig


def check_engine_args(config: RunConfig) -> None:
    """Raises `UserError` for arguments that a program does not have. One that is not installed is not asked."""
    engine = config.rollout.engine
    if isinstance(engine, VLLMConfig) and (fields := dataclass_fields("vllm", "engine/arg_utils.py", "EngineArgs")):
        refuse(unknown("rollout.engine.args", engine.args, fields, "vLLM"))


def dataclass_fields(package: str, file: str, name: str) -> list[str]:
    """Returns the names of a dataclass's fields, without importing it, which takes vLLM ten seconds."""
    found = find_spec(package)
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        for statement in ast.parse((Path(folder) / file).read_text()).body:
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                fields = [one.target for one in statement.body if isinstance(one, ast.AnnAssign)]
                return [field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_")]
    return []
