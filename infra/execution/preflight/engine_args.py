"""Checks arguments that a config passes on to other programs (`args`) against those that the programs have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ratchet.infra.execution.preflight.mistakes import refuse
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.engine_args import unknown
from ratchet.rlhf.config.engines import VLLMConfig


def check_engine_args(config: RunConfig) -> None:
    """Raises `UserError` for arguments that a program does not have. One that is not installed is not asked."""
    mistakes, rollout = [], config.rollout.engine
    if isinstance(rollout, VLLMConfig) and (known := fields("vllm", "engine/arg_utils.py", "EngineArgs")):
        mistakes += unknown("rollout.engine.args", rollout.args, known, "vLLM")
    for role, trainer in config.trainers.items():
        zero = trainer.engine.args.get("zero_optimization")
        if isinstance(zero, dict) and (known := fields("deepspeed", "runtime/zero/config.py", "DeepSpeedZeroConfig")):
            mistakes += unknown(f"{role}.engine.args.zero_optimization", zero, known, "DeepSpeed")
    refuse(mistakes)


def fields(package: str, file: str, name: str) -> list[str]:
    """Returns the names and aliases of a dataclass's or model's fields, without importing it: vLLM takes ten
    seconds."""
    found = find_spec(package)
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        for statement in ast.parse((Path(folder) / file).read_text()).body:
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                return [name for line in statement.body if isinstance(line, ast.AnnAssign) for name in _names(line)]
    return []


def _names(field: ast.AnnAssign) -> Iterator[str]:
    if isinstance(field.target, ast.Name):
        yield field.target.id
    for keyword in field.value.keywords if isinstance(field.value, ast.Call) else []:
        if keyword.arg == "alias" and isinstance(keyword.value, ast.Constant):
            yield str(keyword.value.value)
