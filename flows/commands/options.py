"""Arguments and options that several commands share."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from pydantic import JsonValue

from ratchet.rlhf import consent
from ratchet.rlhf.config.roles import EXPORTED, ROLES
from ratchet.rlhf.errors import RatchetError, UserError

DEFAULT_STORE = "file://./runs"


def run_names(context: typer.Context, incomplete: str) -> list[str]:
    from ratchet.infra.runs.run import run_names as names_of

    store = context.params.get("store") or os.environ.get("RATCHET_STORE", DEFAULT_STORE)
    try:
        return [name for name in names_of(store) if name.startswith(incomplete)]
    except RatchetError:  # a shell shows no errors while it completes
        return []


Name = Annotated[
    str, typer.Argument(metavar="RUN", help="a run's name in the store, or its full URL", autocompletion=run_names)
]
Names = Annotated[
    list[str],
    typer.Argument(metavar="RUN...", help="names in the store, or full URLs", autocompletion=run_names),
]
Store = Annotated[str, typer.Option(envvar="RATCHET_STORE", help="folder of runs, any fsspec URL")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="a.b=c", help="values of the config to change")]
TakeOver = Annotated[
    bool, typer.Option("--take-over", help="continue even if another driver is alive, which is then shut out")
]


def _is_exported(role: str) -> str:
    if role not in EXPORTED:
        raise typer.BadParameter(f"{role!r} is not one of {', '.join(EXPORTED)}")
    return role


RoleOption = Annotated[
    str,
    typer.Option(
        "--role",
        callback=_is_exported,
        metavar=f"[{'|'.join(EXPORTED)}]",
        autocompletion=lambda: EXPORTED,
        help=f"the model: {', '.join(f'{name} ({ROLES[name].card})' for name in EXPORTED)}",
    ),
]
AcceptChanges = Annotated[
    bool,
    typer.Option("--accept-changes", help="continue the run with other data, another reward or another algorithm"),
]


def _trusting(context: typer.Context, is_set: bool) -> None:
    if is_set:
        context.with_resource(consent.trusting())


TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        callback=_trusting,
        help="run the code that the run's config names (rewards, environments, tools, agents, models), although it "
        "has not run on this machine before; RATCHET_TRUST_CODE=1 does the same",
    ),
]
Image = Annotated[
    str | None, typer.Option(help="the image of the containers, if the work pool starts containers: docker, kubernetes")
]
JobVariables = Annotated[
    list[str] | None,
    typer.Option(
        "--job-variable",
        metavar="K=V",
        help="a variable of the work pool's job template, such as memory=64Gi; repeatable",
    ),
]
Iteration = Annotated[int | None, typer.Option(help="the snapshot after this many iterations; by default the newest")]
Best = Annotated[bool, typer.Option("--best", help="the snapshot with the best validation")]
Adapter = Annotated[bool, typer.Option("--adapter", help="only the adapter (model.lora), in PEFT's format")]


class Format(StrEnum):
    table = "table"
    json = "json"
    csv = "csv"
    md = "md"


class TreeFormat(StrEnum):
    tree = "tree"
    json = "json"


class DocumentFormat(StrEnum):
    table = "table"
    json = "json"


def url_of(name: str, store: str) -> str:
    """Returns the URL of a run that is named by its name in the store, its URL, or the path of its folder."""
    from ratchet.infra.execution.claims import run_url

    if "://" in name:
        return name.rstrip("/")
    # without a slash, the name of a folder may be that of a run
    return f"file://{Path(name).resolve()}" if Path(name).is_dir() and "/" in name else run_url(store, name)


def run_argument(url: str) -> str:
    """Returns the argument by which commands of this environment find a run: its name in the default store, or its
    URL.
    """
    return url.removeprefix(f"{os.environ.get('RATCHET_STORE', DEFAULT_STORE)}/")


def parse_job_variables(given: list[str] | None) -> dict[str, JsonValue]:
    """Returns variables by name; a value may be JSON. Raises `UserError` for one that has no name."""
    variables: dict[str, JsonValue] = {}
    for assignment in given or []:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise UserError(f"--job-variable {assignment} is not NAME=VALUE, as in --job-variable memory=64Gi")
        try:
            variables[name] = json.loads(value)
        except ValueError:
            variables[name] = value
    return variables


def write_new(path: Path, text: str) -> None:
    """Writes a file that does not exist yet; raises `UserError` if that fails."""
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists: name another file, or delete it") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def make_folder(path: Path) -> None:
    """Makes a folder and its parents; raises `UserError` if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write a folder at {path}: {error.strerror}") from None
