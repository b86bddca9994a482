"""What people see of an iteration in Prefect's pages: one Markdown artifact, on a server that stays."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import httpx
from prefect.artifacts import create_markdown_artifact
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL

from infra.driver import Driver
from infra.runs import Run

WATCHED = (
    "reward/mean",
    "critic/score/mean",
    "actor/ref_kl",
    "actor/entropy",
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "critic/vf_loss",
    "critic/vf_explained_var",
    "response_length/mean",
)


def show_iteration(iteration: int, metrics: Mapping[str, float]) -> None:
    """Leave an artifact; a server that does not take it is no reason to stop."""
    if not PREFECT_API_URL.value():
        return  # a temporary server ends with the process: nobody will look
    driver = Driver.current()
    with suppress(PrefectHTTPStatusError, httpx.TransportError):
        create_markdown_artifact(
            markdown(Run(driver.store), iteration, metrics),
            key=f"{_slug(driver.config.run.name)}-iterations",
            description=f"{driver.config.run.name}, iteration {iteration}",
        )


def markdown(run: Run, iteration: int, metrics: Mapping[str, float]) -> str:
    """Metrics, stage times, the best and the worst trajectories."""
    config = run.config
    place = f"{config.run.name} --store {config.run.store}"
    lines = [f"# {config.run.name}, iteration {iteration}", "", "| metric | value |", "|---|---|"]
    lines += [f"| {name} | {metrics[name]:.4g} |" for name in WATCHED if name in metrics]
    lines += ["", "| stage | seconds |", "|---|---|"]
    timings = {name.removeprefix("timing_s/"): value for name, value in metrics.items() if name.startswith("timing_s/")}
    lines += [f"| {name} | {seconds:.2f} |" for name, seconds in timings.items()]
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
