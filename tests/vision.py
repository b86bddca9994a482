"""The parts of the vision demo, for tests: its pictures and its model, in small."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

EXAMPLE = Path(__file__).parents[1] / "examples" / "vision"
SCRIPT = EXAMPLE / "run.sh"


def make_pictures(folder: Path, *, train: int, test: int, sft: int, shuffled: bool = False) -> None:
    """Writes train.parquet, test.parquet and sft.parquet."""
    sizes = [f"--train={train}", f"--test={test}", f"--sft={sft}"]
    run("pictures.py", str(folder), *sizes, *(["--shuffled"] if shuffled else []))


def make_model(folder: Path, *, hidden: int = 32, layers: int = 1) -> None:
    """Writes the folder of a model with random weights."""
    run("model.py", str(folder), f"--hidden={hidden}", f"--layers={layers}")


def run(script: str, *arguments: str) -> dict[str, Any]:
    """Runs a script of the example in this process, as `python` would."""
    with patch.object(sys, "argv", [script, *arguments]), patch.object(sys, "path", [str(EXAMPLE), *sys.path]):
        return runpy.run_path(str(EXAMPLE / script), run_name="__main__")
