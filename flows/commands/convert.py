"""`ratchet convert`: writes a config from the settings of another program."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ratchet.flows.commands.console import console
from ratchet.flows.commands.options import make_folder
from ratchet.rlhf.errors import UserError


class Program(StrEnum):
    verl = "verl"
    trl = "trl"
    openrlhf = "openrlhf"
    prime_rl = "prime-rl"


def convert(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML or TOML settings, or a shell script that starts the program")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="SETTING", help="more settings, as on its command line")
    ] = None,
    program: Annotated[Program, typer.Option("--from", help="the program whose settings they are")] = Program.verl,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the config to write or replace; by default it is printed")
    ] = None,
) -> None:
    """Convert the settings of verl, TRL, OpenRLHF or prime-rl into a config.

    A setting that would change the result and has no counterpart is an error. Comments say which others have none,
    and what was assumed.

    A script is read, not run. Variables that it does not set have the values of this shell.
    """
    from ratchet.rlhf.convert import convert as converted

    conversion = converted(file, program.value, overrides or [])
    if output is None:
        console.print(conversion.text(), end="", highlight=False)
    else:
        make_folder(output.parent)
        output.write_text(conversion.text())
        console.print(f"{output}: {conversion.summary}", highlight=False)
    try:
        conversion.config()
    except UserError as error:
        raise UserError(f"{error}\nthe config is converted, but cannot be used until these lines are fixed") from None
