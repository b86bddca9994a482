"""The command line, `ratchet`: the table of its commands.

Each checks its input, starts a flow or opens a run, and prints the result. Slow imports are inside the commands.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ratchet.flows.commands.analysis import bisect, explain, plan, reproduce, whatif
from ratchet.flows.commands.console import errors
from ratchet.flows.commands.convert import convert
from ratchet.flows.commands.data import data
from ratchet.flows.commands.dataset import dataset
from ratchet.flows.commands.demo import demo
from ratchet.flows.commands.deploy import deploy, worker
from ratchet.flows.commands.doctor import doctor
from ratchet.flows.commands.forks import fork, relabel, rescore, sweep
from ratchet.flows.commands.imports import import_
from ratchet.flows.commands.models import evaluate, export, ingest, push, serve
from ratchet.flows.commands.pretrained import model
from ratchet.flows.commands.runs import BetweenSides, compare, ls, query, report, show, status, ui, vacuum, verify
from ratchet.flows.commands.train import config_keys, resume, reward_model, rollout_worker, sft, stop, train
from ratchet.flows.terminal import visible
from ratchet.rlhf.errors import RatchetError

app = typer.Typer(
    name="ratchet",
    help="Reinforcement learning for language models as a workflow: every stage is committed and can be resumed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(context_settings={"ignore_unknown_options": True})(convert)  # the options of the other program
app.command()(dataset)
app.command("import")(import_)
app.command(epilog=config_keys() if "--help" in sys.argv else None)(train)
command: Callable[..., None]
for command in (resume, rollout_worker, stop, status, ls, show, query):
    app.command()(command)
app.command(cls=BetweenSides)(compare)
for command in (ui, report):
    app.command()(command)
for command in (fork, sweep, relabel, rescore, bisect, plan, explain, reproduce, whatif, vacuum, verify):
    app.command()(command)
for command in (evaluate, serve, ingest, export, push, sft, reward_model, deploy, worker, demo, doctor):
    app.command()(command)
app.add_typer(data, name="data")
app.add_typer(model, name="model")


def whole_short_help(app: typer.Typer) -> None:
    """Lets the list of commands show the whole first sentence of each command's help, which Typer would crop."""
    for command in app.registered_commands:
        paragraph = (command.callback.__doc__ or "").split("\n\n")[0] if command.callback is not None else ""
        command.short_help = re.split(r"\.(?= |$)", " ".join(paragraph.split()))[0]


whole_short_help(app)
whole_short_help(data)
whole_short_help(model)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        typer.echo(f"ratchet {version('ratchet-rlhf')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and exit", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


def main() -> None:
    """Runs a command. Prints a `RatchetError`, a line per mistake, and exits with its code."""
    sys.path.append(str(Path.cwd()))  # so that reward functions beside the config can be imported
    # transformers imports DeepSpeed when it saves a model, and DeepSpeed then warns that there is no GPU
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    try:
        app(prog_name="ratchet")  # however it was started: completion asks by this name
    except RatchetError as error:
        for line in str(error).splitlines():
            errors.print(f"error: {visible(line)}", highlight=False)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
