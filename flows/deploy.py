"""Deploys the flows on a Prefect server.

The server offers the flows in its forms, starts them on schedules through a work pool, and resumes runs whose process
has ended with automations.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.automations import Automation, EventTrigger, Posture, ResourceSpecification
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, StateType
from prefect.deployments.runner import RunnerDeployment
from prefect.events.actions import ChangeFlowRunState
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.flows import Flow, flow
from prefect.types.entrypoint import EntrypointType

from ratchet.flows.evaluate import evaluate
from ratchet.flows.iteration import iteration
from ratchet.flows.prefect_pages import show_report
from ratchet.flows.rescore import rescore
from ratchet.flows.train import train
from ratchet.infra.execution.claims import run_url
from ratchet.infra.runs.run import open_run
from ratchet.infra.runs.vacuum import vacuum as delete_unreached
from ratchet.rlhf.config import RunConfig
from ratchet.tasks.prefect_defaults import DEFAULTS

TAG = "ratchet"
HEARTBEAT_S = 30
GONE_S = 90
"""A flow run without a heartbeat for this long counts as dead."""


@flow(name="vacuum", flow_run_name="{run}", persist_result=False)
def vacuum(run: str, take_over: bool = False) -> list[str]:
    """Delete the files that no commit or fork of the run at the URL `run` references; returns their keys."""
    return delete_unreached(open_run(run).store, take_over)


@flow(name="report", flow_run_name="{run}", persist_result=False)
def report(run: str) -> str:
    """Write the report of the run at the URL `run` into its folder, and link it in Prefect; returns its URL."""
    return show_report(run)


def deploy(
    config: RunConfig,
    *,
    pool: str = "ratchet",
    cron: str | None = None,
    every: timedelta | None = None,
    new_runs: bool = False,
) -> list[str]:
    """Registers the flows, with `config` as the default of their parameters, under the run's name; returns their names.

    The server checks parameters against the config's schema before it starts a flow.

    Args:
        config: The run's config.
        pool: Work pool; created if it does not exist.
        cron: Schedule of `train`.
        every: Interval of `train`, if there is no `cron`.
        new_runs: True if each start of `train` starts a new run.
    """
    shown = config.model_dump(mode="json")
    url = run_url(config.run.store, config.run.name)
    schedule: dict[str, Any] = {"cron": cron} if cron else {"interval": every} if every else {}
    # a flow never runs twice at once: a start while it runs is dropped
    alone = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
    offered: list[tuple[Flow[Any, Any], dict[str, Any], dict[str, Any]]] = [
        (train, {"config": shown, "new_run": new_runs}, schedule),
        (iteration, {"config": shown, "k": 0}, {}),
        (evaluate, {"config": shown}, {}),
        (rescore, {"config": shown}, {}),
        (report, {"run": url}, {}),
        (vacuum, {"run": url}, {}),
    ]
    _prepare(pool)
    for offered_flow, parameters, options in offered:
        _apply(offered_flow, config.run.name, pool, parameters=parameters, concurrency_limit=alone, **options)
    return [f"{offered_flow.name}/{config.run.name}" for offered_flow, _, _ in offered]


def deploy_train(name: str, pool: str) -> UUID:
    """Registers `train` under a name, for flow runs that each bring a config; several may run at once."""
    _prepare(pool)
    return _apply(train, name, pool)


def _prepare(pool: str) -> None:
    """Creates the work pool if it does not exist, and the automations that resume runs."""
    _work_pool(pool)
    for automation in _automations():
        _replace(automation)


def _apply(offered: Flow[Any, Any], name: str, pool: str, **options: Any) -> UUID:
    deployment = offered.to_deployment(
        name=name,
        tags=[TAG, name],
        entrypoint_type=EntrypointType.MODULE_PATH,
        work_pool_name=pool,
        job_variables={
            "working_dir": str(Path.cwd()),  # the base of relative paths in the config
            "env": {**DEFAULTS, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)},
        },
        **options,
    )
    assert isinstance(deployment, RunnerDeployment), "called from code that is not asynchronous"
    applied = deployment.apply()
    assert isinstance(applied, UUID), "called from code that is not asynchronous"
    return applied


def _work_pool(name: str) -> None:
    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(name)
        except ObjectNotFound:
            with suppress(ObjectAlreadyExists):  # a worker that starts may make it at the same time
                client.create_work_pool(WorkPoolCreate(name=name, type="process"))


def _automations() -> list[Automation]:
    """Returns automations that reschedule a flow run that crashed or sends no heartbeat; the run resumes from its log.

    A failed flow run is not restarted: a fenced driver, a wrong config or a broken reward needs a person. Restarting a
    silent flow run that is still alive does no harm: its heartbeat prevents a second start, or the log fences one of
    the two.
    """
    ended = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed", "Fenced")}
    watched: dict[str, Any] = {
        "match": ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
        "match_related": ResourceSpecification(
            {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
        ),
        "for_each": {"prefect.resource.id"},
        "threshold": 1,
    }
    beat, crashed = "prefect.flow-run.heartbeat", "prefect.flow-run.Crashed"
    silent = EventTrigger(
        after={beat}, expect={beat, *ended}, posture=Posture.Proactive, within=timedelta(seconds=GONE_S), **watched
    )
    dead = EventTrigger(expect={crashed}, posture=Posture.Reactive, within=timedelta(0), **watched)
    restart = ChangeFlowRunState(state=StateType.SCHEDULED, name="AwaitingRetry", force=True)
    return [
        Automation(name=f"{TAG}: restart a flow run without heartbeats", trigger=silent, actions=[restart]),
        Automation(name=f"{TAG}: restart a crashed flow run", trigger=dead, actions=[restart]),
    ]


def _replace(automation: Automation) -> None:
    """Creates or replaces an automation. An identical one is kept, with its state about silent flow runs."""
    with get_client(sync_client=True) as client:
        registered = client.read_automations_by_name(automation.name)
        if len(registered) == 1 and _definition(registered[0]) == _definition(automation):
            return
        for outdated in registered:
            client.delete_automation(outdated.id)
    automation.create()


def _definition(automation: Any) -> dict[str, Any]:
    # not as JSON: the order of sets of events must not matter
    definition: dict[str, Any] = automation.model_dump(include={"enabled", "trigger", "actions"})
    definition["trigger"].pop("id", None)
    return definition
