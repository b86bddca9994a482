"""Commands for a Prefect server: deployments, and the workers that run them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from ratchet.flows.commands.console import console
from ratchet.flows.commands.options import Image, JobVariables, Overrides, parse_job_variables, write_new
from ratchet.flows.commands.starting import needs_server
from ratchet.rlhf.config import load_config
from ratchet.rlhf.errors import UserError


def deploy(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="the run's config")],
    overrides: Overrides = None,
    pool: Annotated[str, typer.Option(help="the work pool; a process pool is made if there is none")] = "ratchet",
    image: Image = None,
    job_variables: JobVariables = None,
    work_queue: Annotated[str | None, typer.Option(help="the pool's work queue; by default its default one")] = None,
    cron: Annotated[str | None, typer.Option(help='when to start or resume train, such as "0 3 * * *"')] = None,
    every: Annotated[int | None, typer.Option(metavar="MINUTES", help="or the interval between starts", min=1)] = None,
    new_runs: Annotated[bool, typer.Option("--new-runs", help="each start begins a new run")] = False,
    prefect_yaml: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="register nothing: write the file that `prefect deploy` reads"),
    ] = None,
) -> None:
    """Register train, iteration, evaluate, rescore, report and vacuum on the Prefect server (PREFECT_API_URL).

    With rollout.workers, also rollout-worker.
    """
    from datetime import timedelta

    loaded = load_config(config, overrides or [])
    needs_server()
    if cron and every:
        raise UserError("--cron and --every both set the schedule: give only one")
    from ratchet.flows import deploy as deployments

    where = deployments.WorkPool(pool, work_queue, image, parse_job_variables(job_variables))
    interval = None if every is None else timedelta(minutes=every)
    kind = deployments.prepare(where)
    offered = deployments.deployments_of(loaded, where, cron=cron, every=interval, new_runs=new_runs)
    names = deployments.names_of(offered)
    if prefect_yaml is not None:
        write_new(prefect_yaml, deployments.as_prefect_yaml(offered))
        console.print(
            f"{prefect_yaml} has the deployments, and the automations that resume flow runs:\n"
            f"  prefect --no-prompt deploy --all --prefect-file {prefect_yaml}\n"
            f"  prefect automation create --from-file {prefect_yaml}    (once for each server)",
            highlight=False,
        )
        return
    deployments.register(offered)
    for name in names:
        console.print(name, highlight=False)
    if image is not None and loaded.run.store.startswith("file:"):
        console.print(
            f"run.store is {loaded.run.store}: unless that is a volume in the container, the run ends with it",
            highlight=False,
        )
    start = (
        f"`ratchet worker --pool {pool}`" if kind == deployments.PROCESSES else f"`prefect worker start --pool {pool}`"
    )
    console.print(f"start a worker with {start}; then `prefect deployment run {names[0]}`", highlight=False)
    if urlsplit(api := os.environ["PREFECT_API_URL"]).port != 4200:
        console.print(f"the server shows blank pages unless it was started with PREFECT_UI_API_URL={api}")


def worker(
    pool: Annotated[str, typer.Option(help="the work pool")] = "ratchet",
    once: Annotated[bool, typer.Option("--once", help="start what is due, wait for it, and exit")] = False,
) -> None:
    """Start a Prefect worker that runs deployed flows on this machine."""
    needs_server()
    from ratchet.flows.deploy import PROCESSES, registered_pool

    if (kind := registered_pool(pool).type) != PROCESSES:
        raise UserError(
            f"the work pool {pool} has the type {kind}, and Ratchet starts workers of processes: start a worker of "
            f"that type, as in `prefect worker start --pool {pool}`"
        )
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", PROCESSES]
    # `execv` discards buffered output
    sys.stdout.flush()
    os.execv(sys.executable, [*command, *(["--run-once"] if once else [])])  # so that signals reach it
