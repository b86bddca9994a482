"""Deployments on a Prefect server: flows that it offers in its forms and starts on schedules, through a work pool; and
the automations that go on with a run whose process is gone."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from prefect.automations import Automation, EventTrigger, Posture, ResourceSpecification
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.flows import Flow, flow
from prefect.types.entrypoint import EntrypointType

from flows.evaluate import evaluate
from flows.iteration import iteration
from flows.prefect_pages import show_report
from flows.rescore import rescore
from flows.train import train
from infra.execution.claims import run_url
from infra.runs import open_run
from infra.vacuum import vacuum as delete_unreached
from rlhf.config import RunConfig
from tasks.prefect_defaults import DEFAULTS

TAG = "ratchet"
HEARTBEAT_S = 30
GONE_S = 90
"""A flow run that has not beaten for so long is taken for dead."""


@flow(name="vacuum", flow_run_name="{run}", persist_result=False)
def vacuum(run: str, take_over: bool = False) -> list[str]:
    """Delete what no record and no fork of the run at the URL `run` reaches; returns the keys."""
    return delete_unreached(open_run(run).store, take_over)


@flow(name="report", flow_run_name="{run}", persist_result=False)
def report(run: str) -> str:
    """Write the report of the run at the URL `run` into its folder, as it stands, and leave a link; returns its URL."""
    return show_report(run)


def deploy(
    config: RunConfig,
    *,
    pool: str = "ratchet",
    cron: str | None = None,
    every: timedelta | None = None,
    new_runs: bool = False,
) -> list[str]:
    """Register the flows with `config` as their default, under the run's name; returns the deployments' names.

    The server checks parameters against the config's schema before anything starts. `train` starts as `cron` or `every`
    say, and never runs twice at once: a start while it runs is dropped. With `new_runs`, each start is its own run.
    """
    _work_pool(pool)
    shown = config.model_dump(mode="json")
    url = run_url(config.run.store, config.run.name)
    schedule: dict[str, Any] = {"cron": cron} if cron else {"interval": every} if every else {}
    alone = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
    names = []
    offered: list[tuple[Flow[Any, Any], dict[str, Any], dict[str, Any]]] = [
        (train, {"config": shown, "new_run": new_runs}, schedule),
        (iteration, {"config": shown, "k": 0}, {}),
        (evaluate, {"config": shown}, {}),
        (rescore, {"config": shown}, {}),
        (report, {"run": url}, {}),
        (vacuum, {"run": url}, {}),
    ]
    for offer, parameters, options in offered:
        deployment = offer.to_deployment(
            name=config.run.name,
            parameters=parameters,
            tags=[TAG, config.run.name],
            concurrency_limit=alone,
            entrypoint_type=EntrypointType.MODULE_PATH,
            work_pool_name=pool,
            job_variables={
                "working_dir": str(Path.cwd()),  # where the config's relative paths begin
                "env": {**DEFAULTS, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)},
            },
            **options,
        )
        deployment.apply()  # type: ignore[union-attr]
        names.append(f"{offer.name}/{config.run.name}")
    for automation in _automations():
        _replace(automation)
    return names


def _work_pool(name: str) -> None:
    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(name)
        except ObjectNotFound:
            with suppress(ObjectAlreadyExists):  # a worker that starts may have made it meanwhile
                client.create_work_pool(WorkPoolCreate(name=name, type="process"))


def _automations() -> list[Automation]:
    """A flow run that crashed, or of which nothing was heard for a while, is asked for again: it goes on from its log.

    One that failed is not: a fenced driver, a wrong config or a bad reward ends as failed, and nothing but a person
    mends that. Nor does it matter if a silent one is alive after all: its heartbeat keeps the second from starting, or
    the log fences one of them.
    """
    ended = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed", "Fenced")}
    about: dict[str, Any] = {
        "match": ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
        "match_related": ResourceSpecification(
            {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
        ),
        "for_each": {"prefect.resource.id"},
        "threshold": 1,
    }
    beat, crashed = "prefect.flow-run.heartbeat", "prefect.flow-run.Crashed"
    silent = EventTrigger(
        after={beat}, expect={beat, *ended}, posture=Posture.Proactive, within=timedelta(seconds=GONE_S), **about
    )
    dead = EventTrigger(expect={crashed}, posture=Posture.Reactive, within=timedelta(0), **about)
    again = ChangeFlowRunState(state=StateType.SCHEDULED, name="AwaitingRetry", force=True)
    return [
        Automation(name=f"{TAG}: a silent flow run is asked for again", trigger=silent, actions=[again]),
        Automation(name=f"{TAG}: a crashed flow run is asked for again", trigger=dead, actions=[again]),
    ]


def _replace(automation: Automation) -> None:
    """One that is there and says the same is left alone: with it would go what it knows of silent flow runs."""
    with get_client(sync_client=True) as client:
        there = client.read_automations_by_name(automation.name)
        if len(there) == 1 and _says(there[0]) == _says(automation):
            return
        for found in there:
            client.delete_automation(found.id)
    automation.create()


def _says(automation: Any) -> dict[str, Any]:
    told: dict[str, Any] = automation.model_dump(include={"enabled", "trigger", "actions"})  # sets of events stay sets
    told["trigger"].pop("id", None)
    return told
