"""The arguments of commands that name runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ratchet.rlhf.errors import RatchetError

DEFAULT_STORE = "file://./runs"


def run_names(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a run in the store."""
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


def url_of(name: str, store: str) -> str:
    """The URL of a run that the user names.

    Args:
        name: the run's name in the store, its URL, or the path of its folder.
        store: the folder of runs.
    """
    from ratchet.infra.execution.claims import run_url

    if "://" in name:
        return name.rstrip("/")
    return f"file://{Path(name).resolve()}" if Path(name).is_dir() and "/" in name else run_url(store, name)


def run_argument(url: str) -> str:
    """What a command of this environment takes for a run: its name in the default store, otherwise its URL.

    Args:
        url: the run's URL.
    """
    return url.removeprefix(f"{os.environ.get('RATCHET_STORE', DEFAULT_STORE)}/")
