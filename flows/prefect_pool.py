"""Trains on the workers of a Prefect work pool: each run is a flow run of a deployment of `train`.

Prefect places flow runs, and resumes them when their process dies, as for `ratchet deploy`. This module only asks for
flow runs and waits for them, so it can be killed and repeated.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State, StateType, WorkPoolStatus
from prefect.settings import PREFECT_API_URL
from prefect.states import AwaitingRetry
from prefect.utilities.urls import url_for
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_fixed

from ratchet.flows.deploy import GAVE_UP, RESTARTS, TAG, UNANSWERED_S, WorkPool, deploy_train, is_temporary
from ratchet.infra.store.log import Fenced
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import RatchetError

POLL_S = 1.0
T = TypeVar("T")


class Pool:
    """The workers of a work pool, which train runs."""

    def __init__(self, pool: WorkPool, deployment: str, say: Callable[[str], None]) -> None:
        """Registers the deployment. `say` is called with the reason whenever the pool waits."""
        self._pool, self._say = pool.name, say
        self._deployment = deploy_train(deployment, pool)

    def train(self, configs: Sequence[RunConfig]) -> None:
        """Runs or continues the runs of configs to their ends, all at the same time, and waits for all of them.

        Raises:
            RatchetError: A flow run failed, or was cancelled or deleted.
            Fenced: Another driver has one of the runs, and no flow run failed.
        """
        with get_client(sync_client=True) as client:
            names = {self._ask_for(client, config): config.run.name for config in configs}
            ended = self._wait(client, names)
            failures = [self._failure(client, name, ended.get(flow_run)) for flow_run, name in names.items()]
        if others := [error for error in failures if error is not None and not isinstance(error, Fenced)]:
            raise RatchetError("\n".join(map(str, others)))
        for error in failures:
            if error is not None:
                raise error

    def _ask_for(self, client: SyncPrefectClient, config: RunConfig) -> UUID:
        """Returns the id of a config's flow run, which starts, or starts again if an earlier one has ended."""
        digest = hashlib.sha256(config.model_dump_json().encode()).hexdigest()
        flow_run = self._answer(
            lambda: client.create_flow_run_from_deployment(
                self._deployment,
                parameters={"config": config.model_dump(mode="json")},
                # the key is determined by the config: a repeated call gets the flow run that exists
                idempotency_key=f"{self._deployment} {self._pool} {digest}",
                tags=[TAG, config.run.name],
            )
        )
        # the key admits no second flow run, so the one that has ended starts again
        if flow_run.state is not None and flow_run.state.is_final():
            again: State[None] = AwaitingRetry()
            self._answer(lambda: client.set_flow_run_state(flow_run.id, again, force=True))
        return flow_run.id

    def _wait(self, client: SyncPrefectClient, names: Mapping[UUID, str]) -> dict[UUID, FlowRun]:
        """Waits until flow runs have ended or were deleted; returns those that were not deleted."""
        only, crashed, missed = FlowRunFilter(id=FlowRunFilterId(any_=list(names))), set[UUID](), ""
        while True:
            flow_runs = self._answer(lambda: client.read_flow_runs(flow_run_filter=only, limit=len(names)))
            for flow_run in flow_runs:
                if not _has_crashed(flow_run):
                    crashed.discard(flow_run.id)
                elif flow_run.id not in crashed:
                    crashed.add(flow_run.id)
                    self._say(
                        f"{names[flow_run.id]}: its flow run crashed, and Prefect starts it again ({_link(flow_run)})"
                    )
            if all(_has_ended(flow_run) for flow_run in flow_runs):
                return {flow_run.id: flow_run for flow_run in flow_runs}
            waits = any(flow_run.state is not None and flow_run.state.is_scheduled() for flow_run in flow_runs)
            lacks = self._what_it_lacks(client) if waits else ""
            if lacks and lacks != missed:
                self._say(lacks)
            missed = lacks
            time.sleep(POLL_S)

    def _what_it_lacks(self, client: SyncPrefectClient) -> str:
        """Returns the reason why the pool starts no flow run; empty if it does."""
        match self._answer(lambda: client.read_work_pool(self._pool)).status:
            case WorkPoolStatus.NOT_READY:
                return f"waiting: no worker of the pool {self._pool} is online: `ratchet worker --pool {self._pool}`"
            case WorkPoolStatus.PAUSED:
                return f"waiting: the pool {self._pool} is paused: `prefect work-pool resume {self._pool}`"
            case _:
                return ""

    def _failure(self, client: SyncPrefectClient, name: str, flow_run: FlowRun | None) -> RatchetError | None:
        if flow_run is None:
            return RatchetError(f"{name}: its flow run was deleted: repeat the command to start it again")
        state = flow_run.state
        assert state is not None, "it has ended"
        if state.is_completed():
            return None
        if state.message == GAVE_UP:
            states = self._answer(lambda: client.read_flow_run_states(flow_run.id))
            crash = max((state for state in states if state.is_crashed()), key=lambda state: state.timestamp)
            why = f"it crashed {RESTARTS} times, the last time with: {_line(crash)}"
        else:
            why = _line(state)
        if state.name == "Fenced":
            return Fenced(f"{name}: {why}")
        return RatchetError(
            f"{name}: its flow run ended as {state.name}: {why} ({_link(flow_run)}): "
            "once the cause is gone, repeat the command to continue"
        )

    def _answer(self, ask: Callable[[], T]) -> T:
        """Returns the server's answer; asks again until it answers, since the workers train without it."""
        retry = retry_if_exception(is_temporary)
        return Retrying(retry=retry, wait=wait_fixed(UNANSWERED_S), before_sleep=self._say_unanswered)(ask)

    def _say_unanswered(self, call: RetryCallState) -> None:
        if call.attempt_number == 1:
            self._say(f"waiting: the Prefect server at {PREFECT_API_URL.value()} does not answer")


def _has_crashed(flow_run: FlowRun) -> bool:
    return flow_run.state_type == StateType.CRASHED


def _has_ended(flow_run: FlowRun) -> bool:
    """True if nothing more happens; an automation restarts a crashed flow run."""
    return flow_run.state is not None and flow_run.state.is_final() and not _has_crashed(flow_run)


def _line(state: State[None]) -> str:
    message = state.message or "no reason is given"
    return " ".join(message.removeprefix("Flow run encountered an exception: ").split())


def _link(flow_run: FlowRun) -> str:
    return url_for(flow_run) or f"flow run {flow_run.id}"
