"""What people see of a run in Prefect's pages, on a server that stays: names, tags, logs, progress, and artifacts.

A temporary server ends with the process, and nobody looks at it: there, nothing of this happens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from uuid import UUID

from prefect import get_run_logger, tags
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import FlowRunContext, TagsContext, TaskRunContext
from prefect.exceptions import MissingContextError
from prefect.settings import PREFECT_API_URL

from flows import report
from flows.metrics import PAGES, line, shown_in
from infra.execution.driver import Driver
from infra.progress import Event, IterationClosed, Note, ReplayProgress, StageProgress, StepProgress, listening
from infra.runs import Run, open_run
from infra.store.object_store import ObjectStore, StoreUnavailable
from infra.store.run_store import REPORT
from tasks.recording import recorded

EVERY_S = 1.0
"""Progress is told at most so often, and of nothing shorter: each time is some requests to the server."""


@contextmanager
def tagged(run: str) -> Iterator[None]:
    """Flow runs that begin inside are tagged with `run`, unless they are `untagged`."""
    with tags(run) if PREFECT_API_URL.value() else nullcontext():
        yield


@contextmanager
def untagged() -> Iterator[None]:
    """Task runs that begin inside have no tags: for each of them Prefect would ask its server for a place among the
    tasks of the tag, and a busy server says that it has none, which fails the task."""
    with TagsContext(current_tags=set()):
        yield


@contextmanager
def shown(run: str) -> Iterator[None]:
    """Inside a flow: what is reported is logged, and shown as the progress of its task."""
    if not PREFECT_API_URL.value():
        yield
        return
    with get_client(sync_client=True) as client, listening(_Pages(run, client)):
        yield


class _Pages:
    """Listens to what is going on. A server that does not take it is no reason to stop."""

    def __init__(self, run: str, client: SyncPrefectClient) -> None:
        self.run = run
        self.client = client
        self.bars: dict[str, UUID] = {}
        self.told: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        with suppress(MissingContextError):  # of the heartbeat's thread, which is in no flow: the terminal has it
            match event:
                case Note(text):
                    get_run_logger().warning(f"{self.run} · {text}")
                case ReplayProgress(role, done, total):
                    get_run_logger().info(f"{self.run} · restoring the {role}: update {done + 1} of {total} again")
                case StageProgress(iteration, stage, done, total):
                    self._stage(iteration, stage, done, total)
                case IterationClosed(iteration, metrics):
                    get_run_logger().info(f"{self.run} · it {iteration} closed: {line(metrics)}")
                case StepProgress():
                    pass

    def _stage(self, iteration: int, stage: str, done: int, total: int) -> None:
        name = f"{self.run} · it {iteration} · {stage}" + (f" {done}/{total}" if total > 1 else "")
        get_run_logger().info(name if total > 1 or not done else f"{name}: done")
        context = TaskRunContext.get()
        if total == 1 or context is None:
            return
        context.task_run.name = name  # which the task's next event tells the server; while it runs, we do
        bar, now = f"{_slug(self.run)}-{_slug(stage)}", time.monotonic()
        if done == 0:
            self.bars.pop(bar, None)
            self.told[bar] = now
        finishes = done == total and bar in self.bars
        if now - self.told.get(bar, now) < EVERY_S and not finishes:
            return
        self.told[bar] = now
        recorded(lambda: self._tell(bar, context.task_run.id, name, 100 * done / total), lambda: None)

    def _tell(self, bar: str, task_run: UUID, name: str, percent: float) -> None:
        self.client.set_task_run_name(task_run, name)
        if bar not in self.bars:
            created = create_progress_artifact(percent, key=bar, description=name)
            assert isinstance(created, UUID), "called from a task that is not asynchronous"
            self.bars[bar] = created
        else:
            update_progress_artifact(self.bars[bar], percent, description=name)


def _is_recorded() -> bool:
    """By a server that stays, in a flow run that it knows."""
    return bool(PREFECT_API_URL.value()) and FlowRunContext.get() is not None


def show_iteration(driver: Driver, iteration: int, metrics: Mapping[str, float]) -> None:
    """Leave an artifact; a server or a store that does not answer is no reason to stop."""
    if not _is_recorded():
        return
    with suppress(StoreUnavailable):
        page = markdown(Run(driver.store), iteration, metrics)
        key, title = f"{_slug(driver.config.run.name)}-iterations", f"{driver.config.run.name}, iteration {iteration}"
        recorded(lambda: create_markdown_artifact(page, key=key, description=title), lambda: None)


def show_report(url: str) -> str:
    """Write the report of the run at `url` into its folder, and leave a link to it; returns the report's URL."""
    objects = ObjectStore(url)
    objects.put(REPORT, report.page([open_run(url)]).encode())
    name = objects.url.rpartition("/")[2]
    written = f"{objects.url}/{REPORT}"
    if _is_recorded():
        text, key = f"report of {name}", f"{_slug(name)}-report"
        recorded(lambda: create_link_artifact(written, link_text=text, key=key), lambda: None)
    return written


def markdown(run: Run, iteration: int, metrics: Mapping[str, float]) -> str:
    """Metrics, stage times, the best and the worst trajectories."""
    config = run.config
    place = f"{config.run.name} --store {config.run.store}"
    lines = [f"# {config.run.name}, iteration {iteration}", "", "| metric | value |", "|---|---|"]
    lines += [f"| {metric.name} | {metrics[metric.name]:.4g} |" for metric in shown_in(PAGES) if metric.name in metrics]
    lines += ["", "Stages: compute time, and from when to when in the iteration", "", "| stage | seconds | from | to |"]
    lines += ["|---|---|---|---|"]
    manifests = run.store.manifests(iteration)
    first = min((manifest.began for manifest in manifests.values()), default=0.0)
    for name, one in manifests.items():
        lines.append(f"| {name} | {one.seconds:.2f} | {one.began - first:.2f} | {one.ended - first:.2f} |")
    frame = run.trajectories([iteration], ["prompt", "response", "score"]).sort_values("score", kind="stable")
    for title, rows in (("Worst", frame.head(3)), ("Best", frame.tail(3)[::-1])):
        lines += ["", f"## {title} trajectories", ""]
        for row in rows.itertuples():
            lines += [f"Score {row.score:.3g}:", "", *_quoted(f"{row.prompt}\n→ {row.response}"), ""]
    lines += ["", f"Look further: `ratchet show {place}`, `ratchet report {place} -o report.html`"]
    return "\n".join(lines)


def _quoted(text: str, longest: int = 1_000) -> list[str]:
    """As a code block that nothing in the text can end."""
    shown = text if len(text) <= longest else f"{text[:longest]} …"
    return [f"    {line}" for line in shown.splitlines()]


def _slug(name: str) -> str:
    """Prefect's keys are of lower-case letters, digits and dashes."""
    return "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in name.lower()).strip("-")
