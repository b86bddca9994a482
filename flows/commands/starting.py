"""Starts flows for commands, with a temporary Prefect server unless the environment names a server."""

from __future__ import annotations

import os
from pathlib import Path

from ratchet.flows.commands.console import console
from ratchet.flows.commands.options import DEFAULT_STORE, make_folder
from ratchet.flows.temporary_server import TemporaryServer
from ratchet.flows.terminal import visible
from ratchet.rlhf.config import RewardTraining, RunConfig, SFTConfig
from ratchet.rlhf.distributed.gpus import GPUs
from ratchet.rlhf.errors import UserError, counted, reached


def has_server() -> bool:
    """True if `PREFECT_API_URL` names a server. Imports Prefect only then."""
    if not os.environ.get("PREFECT_API_URL"):
        return False
    silence_prefect()
    return True


def announce(config: RunConfig, accept_changes: bool, gpu: str | None) -> None:
    """Checks everything that a start would check, and says what it would do; `gpu` names GPUs other than this
    machine's."""
    gpus = None if gpu is None else GPUs.named(gpu)
    silence_prefect()
    from ratchet.flows.callbacks import check_named
    from ratchet.flows.summary import first_prompt, ledger_lines, summary
    from ratchet.flows.terminal import progress
    from ratchet.infra.execution.driver import check_start
    from ratchet.infra.execution.epochs import with_iterations
    from ratchet.infra.execution.preflight.run import say_what_changed
    from ratchet.rlhf.distributed import accelerator
    from ratchet.rlhf.rollout.memory_ledger import Models, check_fits_gpu
    from ratchet.tasks.fingerprints import check_open_iteration

    check_named(config)
    with progress(console):
        config = with_iterations(config)
        state = check_start(
            config, take_over=True, accept_changes=accept_changes, check=check_open_iteration, gpus=gpus
        )
        say_what_changed(state, config)
    models = Models.of(config)
    memory = None if gpus is None else gpus.memory
    if gpus is None and accelerator.is_available():
        memory = float(accelerator.free_and_total()[1])
    for line in (*summary(config, state), *ledger_lines(config, models, memory), first_prompt(config)):
        console.print(visible(line), highlight=False)
    if gpus is not None:
        check_fits_gpu(config, models, gpus)


def drive_run(config: RunConfig, take_over: bool = False, accept_changes: bool = False) -> None:
    """Starts or continues a run until it has all iterations, and says which commands show it."""
    server = start_server()
    from ratchet.flows.callbacks import check_named
    from ratchet.flows.terminal import progress
    from ratchet.infra.execution.claims import run_url
    from ratchet.infra.execution.epochs import with_iterations
    from ratchet.infra.execution.stopping import on_signals
    from ratchet.infra.runs.run import open_run

    check_named(config)
    with on_signals(stop_early), progress(console):
        config = with_iterations(config)
    train_to_the_end(config, server, take_over, accept_changes)
    elsewhere = "" if config.run.store == DEFAULT_STORE else f" --store {config.run.store}"
    done = open_run(run_url(config.run.store, config.run.name)).state.iteration
    is_whole = done == config.iterations
    has = f"its {counted(done, 'iteration')}" if is_whole else reached(done, config.iterations)
    console.print(
        f"run {config.run.name} has {has}\n"
        f"  ratchet status {config.run.name}{elsewhere}    what each iteration did\n"
        f"  ratchet show {config.run.name}{elsewhere}      the trajectories"
    )


def train_to_the_end(
    config: RunConfig, server: TemporaryServer | None, take_over: bool = False, accept_changes: bool = False
) -> None:
    from ratchet.flows.terminal import progress
    from ratchet.infra.execution.driver import check_start
    from ratchet.infra.execution.stopping import on_signals

    with on_signals(stop_early), progress(console, config.iterations):
        from ratchet.tasks.fingerprints import check_open_iteration

        # before waiting for the server, so that a mistake is reported at once
        check_start(config, take_over=take_over, accept_changes=accept_changes, check=check_open_iteration)
        from ratchet.flows.train import drive
        from ratchet.flows.train import train as flow
        from ratchet.tasks.recording import recorded

        wait_for(server)
        ended = recorded(
            lambda: flow(config, take_over=take_over, accept_changes=accept_changes),
            lambda: drive(config, take_over, accept_changes),
        )
        if ended is not None:  # a `Failed` state, if Prefect did not record the flow
            ended.result()


def fit(config: SFTConfig | RewardTraining) -> dict[str, float]:
    """Runs or continues a fine-tuning run; returns its last metrics."""
    make_folder(Path(config.output))
    server = start_server()
    from ratchet.flows.sft import sft as supervise
    from ratchet.flows.terminal import progress
    from ratchet.flows.train_reward_model import train_reward_model
    from ratchet.tasks.recording import recorded

    wait_for(server)
    with progress(console):
        if isinstance(config, SFTConfig):
            return recorded(lambda: supervise(config), lambda: supervise.fn(config))
        return recorded(lambda: train_reward_model(config), lambda: train_reward_model.fn(config))


def stop_early(*_: object) -> None:
    """Handles a signal before the driver starts or after it ends."""
    # `sys.stderr` refuses to print while it is interrupted, and a package that catches exceptions while it is
    # imported would swallow an `Exception`
    os.write(2, b"error: stopped: repeat the command to continue\n")
    raise SystemExit(1)


def silence_prefect() -> None:
    """Silences Prefect, since errors are printed in one line here; must be called before Prefect is imported."""
    silent = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL" if os.environ.get("PREFECT_API_URL") else "PREFECT_LOGGING_LEVEL"
    os.environ.setdefault(silent, "CRITICAL")
    os.environ.setdefault("PREFECT_INTERNAL_LOGGING_LEVEL", "CRITICAL")  # a stop may end the server before its client
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def start_server() -> TemporaryServer | None:
    """Starts a temporary Prefect server in the background; None if PREFECT_API_URL names a server."""
    silence_prefect()
    return None if os.environ.get("PREFECT_API_URL") else TemporaryServer()


def wait_for(server: TemporaryServer | None) -> None:
    """Waits for a temporary server, and tells the user if that takes a while."""
    if server is not None:
        if not server.is_ready:
            console.print("starting Prefect (a temporary server on this machine; 5 to 40 s)")
        server.wait()


def needs_server() -> None:
    """Raises `UserError` if PREFECT_API_URL names no server."""
    if not os.environ.get("PREFECT_API_URL"):
        raise UserError(
            "PREFECT_API_URL is not set: start a server with `prefect server start`, and "
            "`export PREFECT_API_URL=http://127.0.0.1:4200/api`"
        )
