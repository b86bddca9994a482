"""Commands for a Prefect server: deployments, and the workers that run them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from ratchet.flows.commands.console import console
from ratchet.flows.commands.options import Overrides
from ratchet.flows.commands.starting import needs_server
from ratchet.rlhf.config import load_config
from ratchet.rlhf.errors import UserError


def deploy(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="the run's config")],
    overrides: Overrides = None,
    pool: Annotated[str, typer.Option(help="the work pool; a process pool is made if there is none")] = "ratchet",
    cron: Annotated[str | None, typer.Option(help='when to start or resume train, such as "0 3 * * *"')] = None,
    every: Annotated[int | None, typer.Option(metavar="MINUTES", help="or the interval between starts", min=1)] = None,
    new_runs: Annotated[bool, typer.Option("--new-runs", help="each start begins a new run")] = False,
) -> None:
    """Register train, iteration, evaluate, rescore, report and vacuum on the Prefect server (PREFECT_API_URL)."""
    from datetime import timedelta

    loaded = load_config(config, overrides or [])
    needs_server()
    if cron and every:
        raise UserError("--cron and --every both set the schedule: give only one")
    from ratchet.flows.deploy import deploy as register

    interval = None if every is None else timedelta(minutes=every)
    names = register(loaded, pool=pool, cron=cron, every=interval, new_runs=new_runs)
    for name in names:
        console.print(name, highlight=False)
    console.print(f"start a worker with `ratchet worker --pool {pool}`; then `prefect deployment run {names[0]}`")
    if urlsplit(api := os.environ["PREFECT_API_URL"]).port != 4200:
        console.print(f"the server shows blank pages unless it was started with PREFECT_UI_API_URL={api}")


def worker(
    pool: Annotated[str, typer.Option(help="the work pool")] = "ratchet",
    once: Annotated[bool, typer.Option("--once", help="start what is due, wait for it, and exit")] = False,
) -> None:
    """Start a Prefect worker that runs deployed flows on this machine."""
    needs_server()
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process"]
    # `execv` discards buffered output
    sys.stdout.flush()
    os.execv(sys.executable, [*command, *(["--run-once"] if once else [])])  # so that signals reach it
