"""Commands that train: train, resume, stop, and the fine-tuning runs sft and reward-model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ratchet.flows.commands.console import console
from ratchet.flows.commands.options import (
    DEFAULT_STORE,
    AcceptChanges,
    Name,
    Overrides,
    Store,
    TakeOver,
    TrustCode,
    url_of,
)
from ratchet.flows.commands.starting import announce, drive_run, fit
from ratchet.rlhf import consent
from ratchet.rlhf.config import RewardTraining, RunConfig, SFTConfig, keys, load_config, overridden, validated
from ratchet.rlhf.errors import RatchetError, UserError, counted


def config_keys() -> str:
    rows = [f"{key} = {default}   {meaning} ({kind})" for key, kind, default, meaning in keys(RunConfig)]
    return "\b\nKeys of the config, as a.b=c overrides or sections of the YAML file:\n" + "\n".join(rows)


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="the run's config")],
    overrides: Overrides = None,
    run: Annotated[str | None, typer.Option(help="the run's name (run.name)")] = None,
    store: Annotated[str | None, typer.Option(envvar="RATCHET_STORE", help="folder of runs (run.store)")] = None,
    take_over: TakeOver = False,
    accept_changes: AcceptChanges = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check everything, say what would happen, and stop")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="with --dry-run: GPUs that the run is to fit, such as h100x8")
    ] = None,
) -> None:
    """Start a run, or resume it if it exists."""
    given = {"run.name": run, "run.store": store}
    values = {key: value for key, value in given.items() if value}
    loaded = load_config(config, overrides or []).with_values(values)
    if gpu is not None and not dry_run:
        raise UserError("--gpu only compares a dry run with other GPUs: add --dry-run, or remove it")
    if dry_run:
        announce(loaded, accept_changes, gpu)
    else:
        drive_run(loaded, take_over, accept_changes)


def resume(
    name: Name,
    store: Store = DEFAULT_STORE,
    take_over: TakeOver = False,
    accept_changes: AcceptChanges = False,
    trust_code: TrustCode = False,
) -> None:
    """Resume from the last committed stage, with the config of the last driver."""
    from ratchet.infra.runs.run import open_run

    url = url_of(name, store)
    parent, _, leaf = url.rpartition("/")  # where the run was opened, which may differ from its config
    stored = open_run(url).config
    stored.require_own("cannot resume it")
    consent.require(stored)
    drive_run(stored.with_values({"run.store": parent, "run.name": leaf}), take_over, accept_changes)


def rollout_worker(name: Name, store: Store = DEFAULT_STORE, trust_code: TrustCode = False) -> None:
    """Generate beside the driver of a run that has rollout.workers, on this or any machine, until the run is complete.

    Any number may come and go at any time. Each needs the run's store, and the model and the prompts of its config.
    """
    from ratchet.flows.terminal import progress
    from ratchet.infra.runs.run import open_run

    url = url_of(name, store)
    open_run(url).config.require_own("cannot generate for it")
    with progress(console):
        from ratchet.tasks.rollout_worker import work

        shards = work(url)
    console.print(f"run {name} is complete; this worker has generated {counted(shards, 'shard')}")


def stop(name: Name, store: Store = DEFAULT_STORE) -> None:
    """Ask the run's driver to stop, wait until it has, and end its workers on Ray."""
    import time

    from ratchet.infra.execution import heartbeat
    from ratchet.infra.runs.run import open_run
    from ratchet.infra.workers.ray_group import end_idle

    run = open_run(url_of(name, store))
    if not run.is_fit:
        run.config.require_own("cannot stop it", "end that trainer's own process")
    beat = heartbeat.is_alive(run.store.objects, lambda text: console.print(text))
    if beat is None:
        ended = not run.is_fit and end_idle(run.config, run.store.url)
        workers = "its workers on Ray have ended" if ended else "nothing to stop"
        console.print(f"{name} has no live driver; {workers}")
        return
    run.store.objects.put(heartbeat.stop_key(beat.term), b"{}")
    console.print(f"asked the driver (pid {beat.pid} on {beat.host}) to stop")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(1)
        if heartbeat.is_alive(run.store.objects) is None:
            resume_with = "the command that started it" if run.is_fit else f"`ratchet resume {name}`"
            if not run.is_fit:
                end_idle(run.config, run.store.url)
            console.print(f"{name} has stopped; {resume_with} continues from the last commit")
            return
    raise RatchetError(
        f"the driver of {name} has not stopped within 60 s and may hang: kill pid {beat.pid} on {beat.host}"
    )


def sft(
    model: Annotated[str, typer.Option(help="the model to start from")],
    data: Annotated[str, typer.Option(help="Parquet, Arrow, JSON or CSV with prompt and response, or with messages")],
    output: Annotated[Path, typer.Option(help="folder of the resulting model; its name is also the run's")],
    steps: Annotated[int, typer.Option(help="optimizer steps", min=1)] = 250,
    batch_examples: Annotated[int, typer.Option(help="examples per optimizer step", min=1)] = 128,
    lr: Annotated[float, typer.Option(help="peak learning rate")] = 1e-5,
    warmup_steps: Annotated[int, typer.Option(help="steps over which the learning rate rises", min=0)] = 0,
    weight_decay: Annotated[float, typer.Option(help="AdamW's weight decay", min=0)] = 0.0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    seed: Annotated[int, typer.Option(help="seed of the order of the examples", min=0)] = 0,
    store: Store = DEFAULT_STORE,
    overrides: Overrides = None,
) -> None:
    """Supervised fine-tuning on prompts and responses, the first step of every RLHF recipe."""
    config = {
        "run": {"name": output.name, "store": store, "seed": seed},
        "model": {"path": model, "dtype": dtype},
        "data": data,
        "output": str(output),
        "steps": steps,
        "batch_examples": batch_examples,
        "lr": lr,
        "warmup_steps": warmup_steps,
        "weight_decay": weight_decay,
    }
    metrics = fit(validated(SFTConfig, overridden(config, overrides or [], SFTConfig), "sft"))
    console.print(f"supervised model in {output} (loss {metrics['sft/loss']:.3f})")


def reward_model(
    model: Annotated[str, typer.Option(help="the model to start from, such as a supervised one")],
    data: Annotated[str, typer.Option(help="Parquet, Arrow, JSON or CSV with prompt, chosen and rejected")],
    output: Annotated[Path, typer.Option(help="folder of the resulting model; its name is also the run's")],
    validation: Annotated[str | None, typer.Option(help="held-out pairs")] = None,
    epochs: Annotated[int, typer.Option(help="passes over the pairs", min=1)] = 1,
    batch_pairs: Annotated[int, typer.Option(help="pairs per optimizer step", min=1)] = 64,
    lr: Annotated[float, typer.Option(help="peak learning rate")] = 1e-5,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    seed: Annotated[int, typer.Option(help="seed of the order of the pairs", min=0)] = 0,
    store: Store = DEFAULT_STORE,
    overrides: Overrides = None,
) -> None:
    """Train a reward model on preferences (Bradley-Terry), for reward.model; the same command resumes it."""
    config = {
        "run": {"name": output.name, "store": store, "seed": seed},
        "model": {"path": model, "dtype": dtype},
        "data": data,
        "validation": validation,
        "output": str(output),
        "epochs": epochs,
        "batch_pairs": batch_pairs,
        "lr": lr,
    }
    metrics = fit(validated(RewardTraining, overridden(config, overrides or [], RewardTraining), "reward-model"))
    held_out = f", {metrics['val/accuracy']:.1%} of the held-out pairs" if "val/accuracy" in metrics else ""
    console.print(
        f"reward model in {output} ({metrics['reward/accuracy']:.1%} of the pairs are ranked correctly{held_out})"
    )
