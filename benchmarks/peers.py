"""Converts the examples of another program, and says which ones convert and why the others do not.

    python benchmarks/peers.py verl /path/to/verl/examples --at 'Commit 1dda039 of 2026-08-22'

It reads the shell scripts, TOML and YAML files in the folder, and the command lines in the docstrings of Python
programs. An example converts if its config is valid: no model is loaded and no data is read. The table of the program
in `benchmarks/peers.md`, which `make docs` copies to `docs/migration.md`, is replaced.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ratchet.rlhf.convert import convert
from ratchet.rlhf.errors import UserError

TABLES = Path(__file__).with_suffix(".md")
ENDINGS = (".sh", ".slurm", ".toml", ".yaml", ".py")
OTHERS = "starts |has no section orchestrator|has no command that starts|has no settings of"
"""Beginnings of the errors of files that start no training, or another one."""


def examples(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in ENDINGS and (path.suffix != ".py" or _command(path) is not None):
            yield path


def _command(path: Path) -> str | None:
    """Returns the first command line in a program's docstring that starts the program with options."""
    texts = [
        node.value.value
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    lines = iter("\n".join(text for text in texts if isinstance(text, str)).splitlines())
    for line in lines:
        words = line.strip()
        if not re.match(r"(\w+=\S+ )*(python|accelerate|trl) ", words):
            continue
        while words.endswith("\\"):
            words = words.removesuffix("\\") + next(lines, "").strip()
        if path.name in words and "--" in words.partition(path.name)[2]:
            return words
    return None


def problems(path: Path, program: str) -> list[str]:
    """Returns the reasons for which an example is refused; none if it converts."""
    with tempfile.TemporaryDirectory() as folder:
        script = path
        if path.suffix in (".py", ".slurm"):
            script = Path(folder) / f"{path.stem}.sh"
            script.write_text(_command(path) or "" if path.suffix == ".py" else path.read_text())
        try:
            convert(script, program).config()
        except UserError as error:
            lines = str(error).splitlines()
            return [line.removeprefix(f"{script}").removeprefix(": ").strip() for line in lines]
    return []


def table(program: str, folder: Path, at: str) -> str:
    results = {str(path.relative_to(folder)): problems(path, program) for path in examples(folder)}
    others = [name for name, reasons in results.items() if reasons and re.match(OTHERS, reasons[0])]
    trainings = [name for name in results if name not in others]
    good = sum(not results[name] for name in trainings)
    lines = [
        f"### {program}\n",
        f"{at}: {good} of {len(trainings)} trainings convert. The last {len(others)} files start others, or none.\n",
        "| example | result |\n|---|---|",
        *(f"| `{name}` | {_shown(results[name])} |" for name in [*trainings, *others]),
    ]
    return "\n".join(lines) + "\n"


def _shown(reasons: list[str]) -> str:
    return "converts" if not reasons else "refused: " + "; ".join(reason.replace("|", "\\|") for reason in reasons)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=("verl", "trl", "openrlhf", "prime-rl"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--at", default="", help="commit and date of the examples")
    arguments = parser.parse_args()
    for name in list(os.environ):
        del os.environ[name]  # scripts read variables
    os.environ["HOME"] = "/home/user"
    tables = dict(re.findall(r"### (\S+)\n(.*?)(?=\n### |\Z)", TABLES.read_text() if TABLES.exists() else "", re.S))
    text = table(arguments.program, arguments.folder, arguments.at)
    tables[arguments.program] = text.split("\n", 1)[1]
    TABLES.write_text("\n".join(f"### {name}\n{body.rstrip()}\n" for name, body in sorted(tables.items())))
    print(text)


if __name__ == "__main__":
    main()
