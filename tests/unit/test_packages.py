"""The four packages are the project's own, and what they must not import at the start they do not."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["flows", "tasks", "rlhf", "infra"])
def test_a_package_is_the_projects_own(name: str) -> None:
    module = importlib.import_module(f"ratchet.{name}")
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().parent == ROOT / name


def test_reading_a_run_needs_neither_torch_nor_prefect() -> None:
    heavy = ("torch", "prefect", "transformers")
    script = f"""
import sys, ratchet.infra.runs.run, ratchet.flows.commands.tables
print([name for name in {heavy} if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


def test_the_public_names_are_imported_when_they_are_used() -> None:
    code = """
import sys, ratchet
ratchet.open_run, ratchet.RunConfig, ratchet.query
assert not {"torch", "prefect", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.slow
def test_all_public_names_are_imported() -> None:
    code = """
import ratchet
for name in ratchet.__all__:
    assert getattr(ratchet, name).__name__ == name
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
