"""`ratchet demo`: runs an example of the package from its data to its result."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

import ratchet
from ratchet.flows.commands.console import console
from ratchet.rlhf.errors import UserError

EXAMPLES = Path(ratchet.__file__).parent / "examples"
FOLDER = Path("examples")
"""Where an example's commands find its files."""


def demos() -> list[str]:
    """Returns the names of the examples that a command runs whole."""
    return sorted(script.parent.name for script in EXAMPLES.glob("*/run.sh"))


def demo(
    name: Annotated[str, typer.Argument(help=f"the example: {', '.join(demos())}", metavar="NAME")] = "sentences",
) -> None:
    """Run an example whole: data, model, training, result. Ctrl-C stops it; the same command resumes.

    The default trains SmolLM2-135M with GRPO, in eleven minutes on two cores. The examples are copied to ./examples
    first, except for files that are there. Change them, and run the demo again.
    """
    if name not in demos():
        raise UserError(f"there is no demo {name}: name one of {', '.join(demos())}")
    try:
        added, changed = _copy_missing(EXAMPLES, FOLDER)
    except OSError as error:
        raise UserError(f"cannot write {FOLDER.resolve()}: {error.strerror}") from None
    if added:
        console.print(f"{added} files of the examples are in {FOLDER.resolve()}", highlight=False)
    if changed:
        console.print(f"kept, though the package has others: {', '.join(map(str, changed))}", highlight=False)
    # its programs are those of this environment, active or not
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    sys.stdout.flush()
    try:
        os.execvpe("bash", ["bash", str(FOLDER / name / "run.sh")], os.environ | {"PATH": path})
    except FileNotFoundError:
        raise UserError("the demos are scripts for bash, which is not installed") from None


def _copy_missing(source: Path, folder: Path) -> tuple[int, list[Path]]:
    """Copies the files that a folder lacks; returns their number, and the others that differ from the source's."""
    added = 0
    changed: list[Path] = []
    for path in sorted(source.rglob("*")):
        copy = folder / path.relative_to(source)
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        if copy.exists():
            changed += [copy] if copy.read_bytes() != path.read_bytes() else []
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            part = copy.with_name(f"{copy.name}.part")  # a kill must not leave half a file, which would be kept
            shutil.copyfile(path, part)
            part.replace(copy)
            added += 1
    return added, changed
