"""Shows a run on Prefect's pages: names, tags, logs, progress, and artifacts.

It needs a permanent server: a temporary one ends with the process, so nothing is shown there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING
from uuid import UUID

from prefect import get_run_logger, tags
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import FlowRunContext, TagsContext, TaskRunContext
from prefect.exceptions import MissingContextError
from prefect.settings import PREFECT_API_URL

from ratchet.flows import report, temporary_server
from ratchet.flows.shown_metrics import PAGES, line, shown_in
from ratchet.infra.execution.driver import Driver
from ratchet.infra.progress import Event, IterationClosed, Note, ReplayProgress, StageProgress, StepProgress, listening
from ratchet.infra.runs.run import Run, open_run
from ratchet.infra.store.object_store import ObjectStore, StoreUnavailable
from ratchet.infra.store.run_store import REPORT
from ratchet.tasks.pipeline import in_order
from ratchet.tasks.recording import recorded

if TYPE_CHECKING:
    import pandas as pd

EVERY_S = 1.0
"""Minimum interval between progress updates, since each takes a few requests; shorter stages have none."""

COLUMNS = ["trajectory_id", "prompt", "response", "score"]
SAMPLES, LONGEST = 8, 1_000
"""Trajectories in a table of these columns, and the most characters of a text."""


def has_pages() -> bool:
    """True if a permanent server records this process."""
    return bool(PREFECT_API_URL.value()) and not temporary_server.is_used()


@contextmanager
def tagged(run: str) -> Iterator[None]:
    """Tags flow runs that start inside with `run`."""
    with tags(run) if has_pages() else nullcontext():
        yield


@contextmanager
def untagged() -> Iterator[None]:
    """Starts task runs inside without tags.

    Prefect asks its server for a concurrency slot for each tag of a task run, and a busy server refuses, which fails
    the task.
    """
    # not `tags()`, which can only add to the tags of the flow
    with TagsContext(current_tags=set()):
        yield


@contextmanager
def shown(run: str) -> Iterator[None]:
    """Logs the events reported inside, and shows the progress of each stage on its task run; use it in a flow."""
    if not has_pages():
        yield
        return
    with get_client(sync_client=True) as client, listening(_Pages(run, client)):
        yield


class _Pages:
    """Listener that sends events to the Prefect server. A server that fails does not stop the run."""

    def __init__(self, run: str, client: SyncPrefectClient) -> None:
        self.run = run
        self.client = client
        self.bars: dict[str, UUID] = {}
        self.updated: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        with suppress(MissingContextError):  # the heartbeat's thread is in no flow: only the terminal shows its events
            match event:
                case Note(text):
                    get_run_logger().warning(f"{self.run} · {text}")
                case ReplayProgress(role, done, total):
                    get_run_logger().info(f"{self.run} · replaying update {done + 1} of {total} of the {role}")
                case StageProgress():
                    self._stage(event)
                case IterationClosed(iteration, metrics):
                    get_run_logger().info(f"{self.run} · it {iteration} closed: {line(metrics)}")
                case StepProgress():
                    pass

    def _stage(self, event: StageProgress) -> None:
        stage, done, total = event.stage, event.done, event.total
        name = f"{self.run} · it {event.iteration} · {stage}" + (f" {done}/{total}" if total > 1 else "")
        if event.in_flight:
            name += f" · {event.in_flight} in flight"
        else:
            get_run_logger().info(name if total > 1 or not done else f"{name}: done")
        context = TaskRunContext.get()
        if total == 1 or context is None:
            return
        context.task_run.name = name  # the task sends it with its next event; until then, `_tell` does
        bar, now = f"{_slug(self.run)}-{_slug(stage)}", time.monotonic()
        # a stage that starts gets a new bar
        if done == 0 and event.in_flight is None:
            self.bars.pop(bar, None)
            self.updated[bar] = now
        # a bar that is shown ends at 100 %, whenever the last update was
        finishes = done == total and bar in self.bars
        if now - self.updated.get(bar, now) < EVERY_S and not finishes:
            return
        self.updated[bar] = now
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
    return has_pages() and FlowRunContext.get() is not None


def show_iteration(driver: Driver, iteration: int, metrics: Mapping[str, float]) -> None:
    """Creates an artifact for an iteration; ignores errors of the server or the store."""
    if not _is_recorded():
        return
    with suppress(StoreUnavailable):
        run = Run(driver.store)
        rows = run.trajectories([iteration], COLUMNS)
        page = markdown(run, iteration, metrics, rows)
        key, title = f"{_slug(driver.config.run.name)}-iterations", f"{driver.config.run.name}, iteration {iteration}"
        recorded(lambda: create_markdown_artifact(page, key=key, description=title), lambda: None)
        table = {name: [str(value)[:LONGEST] for value in rows[name].head(SAMPLES)] for name in COLUMNS}
        samples_key = f"{_slug(driver.config.run.name)}-samples"
        recorded(lambda: create_table_artifact(table, key=samples_key, description=title), lambda: None)


def samples(run: Run, iteration: int) -> pd.DataFrame:
    """Returns the first trajectories of an iteration, for tables."""
    return run.trajectories([iteration], COLUMNS).head(SAMPLES)


def show_report(url: str) -> str:
    """Writes the report of the run at `url` into its folder, and links it in Prefect; returns the report's URL."""
    objects = ObjectStore(url)
    objects.put(REPORT, report.page([open_run(url)]).encode())
    name = objects.url.rpartition("/")[2]
    report_url = f"{objects.url}/{REPORT}"
    if _is_recorded():
        text, key = f"report of {name}", f"{_slug(name)}-report"
        recorded(lambda: create_link_artifact(report_url, link_text=text, key=key), lambda: None)
    return report_url


def markdown(run: Run, iteration: int, metrics: Mapping[str, float], trajectories: pd.DataFrame) -> str:
    """Renders an iteration's page: metrics, stage times, the best and the worst of its trajectories."""
    config = run.config
    place = f"{config.run.name} --store {config.run.store}"
    lines = [f"# {config.run.name}, iteration {iteration}", "", "| metric | value |", "|---|---|"]
    lines += [
        f"| {display.name} | {display.text(metrics[display.name])} |"
        for display in shown_in(PAGES)
        if display.name in metrics
    ]
    lines += [
        "",
        "Stages: compute time, start and end, in seconds from the start of the iteration",
        "",
        "| stage | seconds | from | to |",
    ]
    lines += ["|---|---|---|---|"]
    manifests = in_order(run.store.manifests(iteration))
    first = min((manifest.began for manifest in manifests.values()), default=0.0)
    for name, manifest in manifests.items():
        lines.append(
            f"| {name} | {manifest.seconds:.2f} | {manifest.began - first:.2f} | {manifest.ended - first:.2f} |"
        )
    frame = trajectories.sort_values("score", kind="stable")
    for title, rows in (("Worst", frame.head(3)), ("Best", frame.tail(3)[::-1])):
        lines += ["", f"## {title} trajectories", ""]
        for row in rows.itertuples():
            lines += [f"Score {row.score:.3g}:", "", *_quoted(f"{row.prompt}\n→ {row.response}"), ""]
    lines += ["", f"See also: `ratchet show {place}`, `ratchet report {place} -o report.html`"]
    return "\n".join(lines)


def _quoted(text: str) -> list[str]:
    """Returns the text as an indented code block, which nothing in it can end; cut off after `LONGEST` characters."""
    shown = text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
    return [f"    {line}" for line in shown.splitlines()]


def _slug(name: str) -> str:
    """Turns a name into a key for Prefect, which has only lower-case letters, digits and dashes."""
    return "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in name.lower()).strip("-")
