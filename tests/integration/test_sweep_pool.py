"""`ratchet sweep --pool`: what a sweep says of its flow runs on a real Prefect server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import AwaitingRetry, Cancelled, Completed, Failed

from ratchet.flows.deploy import WorkPool, check_server, prepare
from ratchet.flows.prefect_pool import Pool
from ratchet.infra.store.log import Fenced
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import RatchetError, UserError
from tests import tiny
from tests.ports import free_port
from tests.processes import Processes


def wait(until: Callable[[], object], why: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + 900
    while not until():
        assert time.monotonic() < deadline, why()
        time.sleep(0.2)


def flow_runs(server: str, name: str) -> list[FlowRun]:
    """Those of `train` with a tag."""
    with SyncPrefectClient(server) as client:
        return client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=["ratchet", name])))


class Waiting:
    """A pool without workers trains configs in a thread: a test does to their flow runs what workers would do."""

    def __init__(self, server: str, configs: list[RunConfig]) -> None:
        self.server, self.said, self.error = server, list[str](), None
        names = [config.run.name for config in configs]
        self.known = {name: len(flow_runs(server, name)) for name in names}
        prepare(WorkPool("nobody"))
        pool = Pool(WorkPool("nobody"), "waited-for", self.said.append)
        settings = copy_context()  # which name the server
        self.thread = threading.Thread(target=settings.run, args=(self._train, pool, configs), daemon=True)
        self.thread.start()
        wait(lambda: any("no worker of the pool nobody" in line for line in self.said))

    def _train(self, pool: Pool, configs: list[RunConfig]) -> None:
        try:
            pool.train(configs)
        except RatchetError as error:
            self.error = error

    def becomes(self, name: str, state: State[None]) -> FlowRun:
        [flow_run] = flow_runs(self.server, name)
        with SyncPrefectClient(self.server) as client:
            client.set_flow_run_state(flow_run.id, state, force=True)
        return flow_run

    def end(self) -> RatchetError | None:
        self.thread.join(900)
        assert not self.thread.is_alive(), self.said
        return self.error


def test_what_becomes_of_flow_runs_is_told(workspace: Path, prefect_server: str) -> None:
    a, b = (f"told-{os.getpid()}-{letter}" for letter in "ab")
    configs = [tiny.config(workspace, run__name=name) for name in (a, b)]
    asked = Waiting(prefect_server, configs)
    first = asked.becomes(a, Failed(message="Flow run encountered an exception: UserError: no such file"))
    done = asked.becomes(b, Completed())
    link = f"{prefect_server.removesuffix('/api')}/runs/flow-run/{first.id}"
    assert str(asked.end()) == (
        f"{a}: its flow run ended as Failed: UserError: no such file ({link}): "
        "once the cause is gone, repeat the command to continue"
    )

    again = Waiting(prefect_server, configs)
    assert [run.id for name in (a, b) for run in flow_runs(prefect_server, name)] == [first.id, done.id]
    assert {run.state_name for name in (a, b) for run in flow_runs(prefect_server, name)} == {AwaitingRetry().name}
    again.becomes(a, Failed(name="Fenced", message="run a is being driven"))
    again.becomes(b, Cancelled(message="by a person"))
    assert f"{b}: its flow run ended as Cancelled: by a person" in str(again.end()), "what needs a person comes first"

    fenced = Waiting(prefect_server, configs)
    fenced.becomes(a, Failed(name="Fenced", message="run a is being driven"))
    fenced.becomes(b, Completed())
    assert isinstance(fenced.end(), Fenced)

    other = Waiting(prefect_server, [configs[0].with_values({"train.iterations": 4})])
    runs = flow_runs(prefect_server, a)
    assert len(runs) == 2, "another config is another flow run"
    with SyncPrefectClient(prefect_server) as client:
        for run in runs:
            client.delete_flow_run(run.id)
    assert f"{a}: its flow run was deleted: repeat the command" in str(other.end())


def test_a_server_that_does_not_answer_is_said_at_once() -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    url = f"http://127.0.0.1:{free_port()}/api"
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(UserError, match=f"{url}.*does not answer"):
        check_server()


def test_arms_at_a_time_need_a_pool(processes: Processes) -> None:
    child = processes.cli("sweep", "base", "--at", 1, "--vary", "actor.lr=1,2", "--parallel", 2)
    assert child.wait() == 2
    assert "--parallel 2 needs --pool NAME" in child.text and "`ratchet worker --pool NAME`" in child.text
