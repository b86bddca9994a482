"""Deploys the flows on a Prefect server.

The server offers the flows in its forms, starts them on schedules through a work pool, and resumes runs whose process
has ended with automations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import yaml
from prefect.automations import Automation, EventTrigger, Posture, ResourceSpecification
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, StateType
from prefect.client.schemas.objects import WorkPool as RegisteredPool
from prefect.deployments.runner import DeploymentApplyError, RunnerDeployment
from prefect.events.actions import ChangeFlowRunState
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError
from prefect.flows import Flow, flow
from prefect.settings import PREFECT_API_URL
from prefect.types.entrypoint import EntrypointType
from prefect.workers.process import ProcessWorker
from pydantic import JsonValue
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_fixed

from ratchet.flows.evaluate import evaluate
from ratchet.flows.iteration import iteration
from ratchet.flows.prefect_pages import show_report
from ratchet.flows.rescore import rescore
from ratchet.flows.rollout_worker import rollout_worker
from ratchet.flows.train import train
from ratchet.infra.execution.claims import run_url
from ratchet.infra.runs.run import open_run
from ratchet.infra.runs.vacuum import vacuum as delete_unreached
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.tasks.prefect_defaults import DEFAULTS

TAG = "ratchet"
PROCESSES = "process"
"""The type of the pools whose workers Ratchet starts."""
HEARTBEAT_S = 30
GONE_S = 90
"""A flow run without a heartbeat for this long counts as dead."""
PAUSE_S = 15
"""Seconds between a crash and the restart."""
RESTARTS, SOON_S = 4, 900
"""A flow run that is restarted this often within so many seconds fails instead."""
GAVE_UP = f"it crashed {RESTARTS} times within {SOON_S // 60} minutes: the last Crashed state says why"
UNANSWERED_S, UNANSWERED_TRIES = 5.0, 12
"""Pause before asking a server again that did not answer, and how often a registration is tried."""
RESTARTED = "AwaitingRestart"
"""The state of a flow run that an automation restarts."""


@flow(name="vacuum", flow_run_name="{run}", persist_result=False)
def vacuum(run: str, take_over: bool = False) -> list[str]:
    """Delete the files that no commit or fork of the run at the URL `run` references; returns their keys."""
    return delete_unreached(open_run(run).store, take_over)


@flow(name="report", flow_run_name="{run}", persist_result=False)
def report(run: str) -> str:
    """Write the report of the run at the URL `run` into its folder, and link it in Prefect; returns its URL."""
    return show_report(run)


@dataclass(frozen=True)
class WorkPool:
    """The work pool that starts the flow runs of deployments, and what it starts them with.

    Args:
        name: Name of the pool.
        queue: Its work queue; None: the default one.
        image: Image of the containers, if the pool starts containers.
        job_variables: Values of the variables of the pool's job template.
    """

    name: str
    queue: str | None = None
    image: str | None = None
    job_variables: Mapping[str, JsonValue] = field(default_factory=dict)


def deployments_of(
    config: RunConfig,
    pool: WorkPool,
    *,
    cron: str | None = None,
    every: timedelta | None = None,
    new_runs: bool = False,
) -> list[RunnerDeployment]:
    """Returns the deployments of the flows, named after the run, with `config` as the default of their parameters.

    The server checks parameters against the config's schema before it starts a flow.

    Args:
        config: The run's config.
        pool: Where the flows run.
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
        *([(rollout_worker, {"run": url}, {"concurrency_limit": None})] if config.rollout.workers else []),
        (evaluate, {"config": shown}, {}),
        (rescore, {"config": shown}, {}),
        (report, {"run": url}, {}),
        (vacuum, {"run": url}, {}),
    ]
    return [
        _deployment(
            offered_flow, config.run.name, pool, parameters=parameters, **{"concurrency_limit": alone, **options}
        )
        for offered_flow, parameters, options in offered
    ]


def names_of(deployments: Sequence[RunnerDeployment]) -> list[str]:
    return [f"{deployment.flow_name}/{deployment.name}" for deployment in deployments]


def register(deployments: Sequence[RunnerDeployment]) -> list[UUID]:
    """Registers deployments on the server, with the automations that resume their flow runs; returns their ids."""
    answered = Retrying(
        retry=retry_if_exception(is_temporary),
        wait=wait_fixed(UNANSWERED_S),
        stop=stop_after_attempt(UNANSWERED_TRIES),
        reraise=True,
    )
    for automation in _automations():
        answered(_replace, automation)
    return [answered(_applied, deployment) for deployment in deployments]


def is_temporary(error: BaseException) -> bool:
    """True if a Prefect server may answer when it is asked again. One that is busy with its SQLite answers 503."""
    cause = error.__cause__ if isinstance(error, DeploymentApplyError) else error
    if isinstance(cause, PrefectHTTPStatusError):
        return cause.response.status_code >= 500
    return isinstance(cause, httpx.TransportError)


def _applied(deployment: RunnerDeployment) -> UUID:
    applied = deployment.apply()
    assert isinstance(applied, UUID), "called from code that is not asynchronous"
    return applied


def deploy_train(name: str, pool: WorkPool) -> UUID:
    """Registers `train` under a name, for flow runs that each bring a config; several may run at once.

    The pool is one that was prepared.
    """
    [deployed] = register([_deployment(train, name, pool)])
    return deployed


def as_prefect_yaml(deployments: Sequence[RunnerDeployment]) -> str:
    """Returns a file that `prefect deploy` and `prefect automation create` read.

    Raises:
        UserError: A parameter contains braces, which `prefect deploy` would replace.
    """
    if braces := [key for deployment in deployments for key in _with_braces(deployment.parameters, "")]:
        raise UserError(
            f"{braces[0]} contains {{{{, which `prefect deploy` would replace: deploy without --prefect-yaml"
        )
    automations = [
        automation.model_dump(mode="json", exclude_none=True, exclude={"id"}) for automation in _automations()
    ]
    file = {
        "deployments": [_entry(deployment) for deployment in deployments],
        "automations": automations,
    }
    text: str = yaml.safe_dump(file, sort_keys=False, allow_unicode=True)
    return text


def _with_braces(value: JsonValue, key: str) -> Iterator[str]:
    match value:
        case str() if "{{" in value:
            yield key
        case dict():
            for name, inner in value.items():
                yield from _with_braces(inner, f"{key}.{name}".removeprefix("."))
        case list():
            for index, inner in enumerate(value):
                yield from _with_braces(inner, f"{key}[{index}]")


def _entry(deployment: RunnerDeployment) -> dict[str, JsonValue]:
    """Returns a deployment as `prefect.yaml` has it."""
    entry: dict[str, JsonValue] = {
        "name": deployment.name,
        "entrypoint": deployment.entrypoint,
        "tags": list(deployment.tags),
        "parameters": deployment.parameters,
        "work_pool": {
            "name": deployment.work_pool_name,
            "work_queue_name": deployment.work_queue_name,
            "job_variables": deployment.job_variables,
        },
        "schedules": [
            schedule.schedule.model_dump(mode="json", include={"cron", "interval"})
            for schedule in deployment.schedules or []
            if schedule.schedule is not None
        ],
        # the code is installed where the flows run; without a step, Prefect would change into the folder of this file
        "pull": [{"prefect.deployments.steps.set_working_directory": {"directory": "."}}],
    }
    if deployment.concurrency_limit is not None and deployment.concurrency_options is not None:
        strategy = deployment.concurrency_options.collision_strategy
        entry["concurrency_limit"] = {"limit": deployment.concurrency_limit, "collision_strategy": str(strategy.value)}
    return entry


def _deployment(offered: Flow[Any, Any], name: str, pool: WorkPool, **options: Any) -> RunnerDeployment:
    environment = {**DEFAULTS, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)}
    given = dict(pool.job_variables)
    added = given.pop("env", {})
    assert isinstance(added, dict), "`prepare` has refused others"
    environment |= {name: str(value) for name, value in added.items()}
    # the base of relative paths in the config; those of an image are relative to its own folder
    place = {"working_dir": str(Path.cwd())} if pool.image is None else {"image": pool.image}
    deployment = offered.to_deployment(
        name=name,
        tags=[TAG, name],
        entrypoint_type=EntrypointType.MODULE_PATH,
        work_pool_name=pool.name,
        work_queue_name=pool.queue,
        job_variables={**place, "env": environment, **given},
        **options,
    )
    assert isinstance(deployment, RunnerDeployment), "called from code that is not asynchronous"
    return deployment


def prepare(pool: WorkPool) -> str:
    """Makes a pool of processes if there is no pool of that name; returns the type of the pool.

    Raises:
        UserError: The pool could not start the flow runs of these deployments.
    """
    registered = registered_pool(pool.name, make=pool.image is None)
    if mistakes := _mistakes(pool, registered):
        raise UserError("\n".join(mistakes))
    return registered.type


def registered_pool(name: str, make: bool = True) -> RegisteredPool:
    """Returns the server's pool of a name; if there is none, it may `make` one of processes."""
    check_server()
    with get_client(sync_client=True) as client:
        try:
            return client.read_work_pool(name)
        except ObjectNotFound:
            if not make:
                raise UserError(
                    f"there is no work pool {name}, and Ratchet makes pools of processes only, which have no images: "
                    f"make it first, as in `prefect work-pool create {name} --type kubernetes`"
                ) from None
            with suppress(ObjectAlreadyExists):  # a worker that starts may make it at the same time
                template = ProcessWorker.get_default_base_job_template()
                client.create_work_pool(WorkPoolCreate(name=name, type=PROCESSES, base_job_template=template))
            return client.read_work_pool(name)


def check_server() -> None:
    """Raises `UserError` if the server does not answer."""
    with get_client(sync_client=True) as client:
        if (error := client.api_healthcheck()) is not None:
            why = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"the Prefect server at {PREFECT_API_URL.value()} (PREFECT_API_URL) does not answer: {why}")


def _mistakes(pool: WorkPool, registered: RegisteredPool) -> list[str]:
    """Returns why flow runs could not start in a pool, by what its job template takes."""
    name = f"the work pool {pool.name} (type {registered.type})"
    template: dict[str, Any] = registered.base_job_template
    variables: dict[str, Any] = template.get("variables", {}).get("properties", {})
    mistakes = []
    if not isinstance(pool.job_variables.get("env", {}), dict):
        mistakes.append("""the job variable env is not an object: --job-variable 'env={"NAME": "value"}'""")
    if not variables:  # its first worker will say
        return mistakes
    if "image" in variables and pool.image is None:
        mistakes.append(
            f"{name} starts flow runs in containers: name an image that contains ratchet-rlhf and the code that the "
            "config names: --image IMAGE"
        )
    if "image" not in variables and pool.image is not None:
        mistakes.append(f"{name} starts flow runs without images: leave out --image")
    if not {"image", "working_dir"} & set(variables):
        mistakes.append(
            f"{name} takes neither an image nor a working directory, so its flow runs would not find Ratchet: "
            "use a pool of another type, such as process or kubernetes"
        )
    if unknown := sorted(set(pool.job_variables) - set(variables)):
        mistakes.append(f"{name} has no job variable {', '.join(unknown)}: it has {', '.join(sorted(variables))}")
    return mistakes


def _automations() -> list[Automation]:
    """Returns automations that reschedule a flow run that crashed or sends no heartbeat; the run resumes from its log.

    One that is rescheduled again and again, such as one that cannot even start, fails.

    A failed flow run is not restarted: a fenced driver, a wrong config or a broken reward needs a person. Restarting a
    silent flow run that is still alive does no harm: its heartbeat prevents a second start, or the log fences one of
    the two.
    """
    beat, crashed, restarted = (f"prefect.flow-run.{name}" for name in ("heartbeat", "Crashed", RESTARTED))
    ended = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed", "Fenced")}
    goes_on = {f"prefect.flow-run.{state}" for state in ("AwaitingRetry", "Pending", "Running", "Cancelling")}
    restart = ChangeFlowRunState(state=StateType.SCHEDULED, name=RESTARTED, force=True)
    give_up = ChangeFlowRunState(state=StateType.FAILED, message=GAVE_UP, force=True)

    def watched(posture: Posture, seconds: int, expect: set[str], threshold: int = 1, **options: Any) -> EventTrigger:
        return EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification(
                {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
            ),
            for_each={"prefect.resource.id"},
            posture=posture,
            expect=expect,
            within=timedelta(seconds=seconds),
            threshold=threshold,
            **options,
        )

    # A proactive trigger fires at the end of a period without an event that it expects, and starts over with one that
    # it expects `after`. A crash is not answered at once: a worker may tell of it twice, and again after the restart.
    triggers = {
        "restart a flow run without heartbeats": (
            watched(Posture.Proactive, GONE_S, {beat, *ended}, after={beat}),
            restart,
        ),
        "restart a crashed flow run": (
            watched(Posture.Proactive, PAUSE_S, {*ended, *goes_on}, after={crashed}),
            restart,
        ),
        "fail a flow run that keeps crashing": (watched(Posture.Reactive, SOON_S, {restarted}, RESTARTS), give_up),
    }
    return [
        Automation(name=f"{TAG}: {name}", trigger=trigger, actions=[action])
        for name, (trigger, action) in triggers.items()
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
