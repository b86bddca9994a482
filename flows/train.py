"""Runs the training loop, resuming from the last committed iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.context import AsyncClientContext, FlowRunContext
from prefect.runtime import flow_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.states import Failed
from prefect.utilities.asyncutils import run_coro_as_sync

from ratchet.flows.callbacks import Callbacks
from ratchet.flows.iteration import iteration
from ratchet.flows.overrides import Override
from ratchet.flows.prefect_events import PrefectEvents
from ratchet.flows.prefect_pages import has_pages, samples, show_report, shown, tagged
from ratchet.flows.summary import summary
from ratchet.flows.tracking import tracking
from ratchet.infra.execution.driver import driving
from ratchet.infra.execution.epochs import with_iterations
from ratchet.infra.progress import note
from ratchet.infra.runs.run import Run
from ratchet.infra.store.log import Fenced
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import RatchetError, counted
from ratchet.tasks.fingerprints import check_open_iteration
from ratchet.tasks.pipeline import dependencies
from ratchet.tasks.recording import noted, recorded
from ratchet.tasks.runner import finish, start
from ratchet.tasks.stages.validate import VALIDATE


@flow(name="train", flow_run_name="{config.run.name}", persist_result=False)
@noted
def train(
    config: RunConfig,
    take_over: bool = False,
    new_run: bool = False,
    accept_changes: bool = False,
    overrides: Sequence[Override] = (),
) -> State[None] | None:
    """Start or resume the run that `config` names, until it has `train.iterations` iterations.

    `overrides` change single values of `config`, such as ``actor.lr=1e-5``. With `accept_changes`, a run continues with
    other data, another reward or another algorithm. With `new_run`, the flow run's id is appended to the run's name:
    every flow run begins a new run, and one that Prefect starts again resumes its own.
    """
    config = config.with_values({}, overrides)
    if new_run:
        # a flow run that Prefect starts again keeps its id, and so resumes its own run
        config = config.with_values({"run.name": f"{config.run.name}-{flow_run.id[:8]}"})
    config = with_iterations(config)
    try:
        drive(config, take_over, accept_changes)
    except Fenced as error:  # a separate state, so that no automation takes it for a crash
        return Failed(name="Fenced", message=str(error), data=error)
    return None


def drive(config: RunConfig, take_over: bool, accept_changes: bool = False) -> None:
    """Runs the remaining iterations and the last validation, recorded by Prefect if its server works."""
    callbacks = Callbacks(config, PrefectEvents())
    # a heartbeat of the iteration's own flow would add a second to each; the heartbeat of this flow covers both
    quiet = temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
    with (
        driving(
            config,
            dependencies(config),
            take_over=take_over,
            accept_changes=accept_changes,
            check=check_open_iteration,
        ) as driver,
        tracking(config, driver.store.log.first, partial(samples, Run(driver.store))) as track,
        quiet,
        _shared_client(),
    ):
        if driver.state.iteration < config.iterations:
            note("\n".join(summary(config, driver.state)))
        scores = Run(driver.store).deciding_scores()
        while (k := driver.state.iteration) < config.iterations:
            if config.ends_early(scores):
                done, patience = counted(k, "iteration"), config.validation.patience
                note(f"ends after {done}: the last {patience} validations were no better")
                break
            with tagged(config.run.name):
                metrics = _iteration(config, k)
            track(k, metrics)
            callbacks.on_iteration(Run(driver.store), k, metrics)
            scores |= Run(driver.store).deciding_scores(k)
        # iterations validate before they train, so the last weights are still to be validated
        if config.validation.data is not None:
            with shown(config.run.name):
                validated = start(driver, VALIDATE, driver.state.iteration, {})
                finish(driver)
                metrics = validated.manifest().metrics
                track(driver.state.iteration, metrics)
                callbacks.on_validation(Run(driver.store), driver.state.iteration, metrics)
    if has_pages():
        try:
            show_report(driver.store.url)
        except RatchetError as error:  # the run is complete, and the report can be written at any time
            note(f"the report was not written: {error}")


def _iteration(config: RunConfig, k: int) -> dict[str, float]:
    return recorded(lambda: iteration(config, k), lambda: iteration.fn(config, k))


@contextmanager
def _shared_client() -> Iterator[None]:
    """Lets the iterations inside share one Prefect client, if Prefect runs them.

    Each would otherwise open its own for its flow run, which loads all root certificates (20 ms) and asks the server
    for a token.
    """
    if FlowRunContext.get() is None:
        yield
        return
    try:
        context = AsyncClientContext()
        # in this event loop, since Prefect uses a client only in the loop in which it was opened
        run_coro_as_sync(context.client.__aenter__())
    except Exception:  # an iteration then makes its own client, and says so if Prefect does not record
        yield
        return
    try:
        with context:
            yield
    finally:
        with suppress(Exception):  # an error of the client must not replace one of the iterations
            run_coro_as_sync(context.client.__aexit__())
