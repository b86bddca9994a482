"""Writes a report that compares runs: the page of `ratchet ui` in one self-contained HTML file.

It reads committed data and claims nothing, so it can be written at any time while the runs continue.
"""

from __future__ import annotations

import base64
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ratchet.flows.ui.documents import (
    Document,
    ImageView,
    RunView,
    TrajectoryDocument,
    decoder,
    image_view,
    run_view,
    scales_of,
    trajectory,
)
from ratchet.flows.ui.page import report_page
from ratchet.infra.progress import note
from ratchet.infra.runs.pictures import picture, shown, shown_size
from ratchet.infra.runs.query import names
from ratchet.infra.runs.run import OnDamage, Run
from ratchet.infra.store.images import Images
from ratchet.infra.store.log import Corrupt
from ratchet.rlhf.errors import UserError, counted
from ratchet.rlhf.schema import trajectory_of

if TYPE_CHECKING:
    import pandas as pd

SAMPLED_ITERATIONS = 3
SAMPLED_TRAJECTORIES = 150
SAMPLED_TOKENS = 200_000
"""Limits of the sample of a run: a browser handles a page of tens of megabytes, but not of hundreds."""
LARGE_SAMPLES = 4
"""With more runs than this, all share the tokens of so many samples."""
IMAGE_SIDE = 320
"""Longest side of an image, in pixels; larger ones are embedded as smaller copies."""
IMAGE_BYTES = 8 * 10**6
"""Largest sum of the images of a report."""


class ReportedRun(Document):
    """A run in a report, with a sample of its trajectories."""

    view: RunView
    trajectories: list[TrajectoryDocument]


class Report(Document):
    written: str
    runs: list[ReportedRun]
    images: dict[str, str]
    """Images of the trajectories as data URLs, by digest."""


class EmbeddedImages:
    """The images of a report: small copies, each once, up to `IMAGE_BYTES` in all."""

    def __init__(self) -> None:
        self.urls: dict[str, str] = {}
        self._seen: dict[str, ImageView] = {}
        self._left_out: set[str] = set()
        self._bytes = 0

    def of(self, images: Images) -> Callable[[str], ImageView]:
        """Returns a function that embeds an image of a run, if there is room, and describes it."""

        def look(digest: str) -> ImageView:
            if digest not in self._seen:
                self._seen[digest] = self._embedded(images, digest)
            return self._seen[digest]

        return look

    def left_out(self) -> str | None:
        """Says how many images had no room; None: all had."""
        if not self._left_out:
            return None
        return (
            f"the report leaves out {counted(len(self._left_out), 'image')}, because it holds at most "
            f"{shown_size(IMAGE_BYTES)} of them: `ratchet ui` shows all"
        )

    def _embedded(self, images: Images, digest: str) -> ImageView:
        try:
            data = images.get(digest)
            seen, small = picture(data), shown(data, IMAGE_SIDE)
        except UserError as error:
            return image_view(digest, str(error))
        if self._bytes + len(small.data) > IMAGE_BYTES:
            self._left_out.add(digest)
        else:
            self._bytes += len(small.data)
            self.urls[digest] = f"data:{small.media_type};base64,{base64.b64encode(small.data).decode()}"
        return image_view(digest, seen)


def write(runs: Sequence[Run], path: Path) -> None:
    """Writes or replaces the report atomically. Raises `UserError` if `path` cannot be written."""
    text = page(runs)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"--output {path}: cannot write there: {error.strerror}; name a file in a folder") from None


def page(runs: Sequence[Run], title: str | None = None, arms: Sequence[Mapping[str, str]] = ()) -> str:
    """Renders the report as HTML.

    Args:
        runs: The runs, in the order of their colours.
        title: Title; None: the names of the runs.
        arms: Facts about the runs as arms of a sweep, by column; shown above everything else.
    """
    run_names = _distinct_names(runs)
    tokens = SAMPLED_TOKENS * min(len(runs), LARGE_SAMPLES) // max(len(runs), 1)
    images = EmbeddedImages()
    report = Report(
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        runs=[_reported(run, name, tokens, images) for name, run in zip(run_names, runs, strict=True)],
        images=images.urls,
    )
    if (left_out := images.left_out()) is not None:
        note(left_out)
    return report_page(title or ", ".join(run_names), report.model_dump_json(), arms)


def _distinct_names(runs: Sequence[Run]) -> list[str]:
    """Returns a name for each run. Raises `UserError` if one is named twice."""
    duplicates = [url for url, count in Counter(run.store.url for run in runs).items() if count > 1]
    if duplicates:
        raise UserError(f"the run at {duplicates[0]} is named twice: name each run once")
    return names(runs)


def _reported(run: Run, name: str, tokens: int, images: EmbeddedImages) -> ReportedRun:
    damages: dict[str, None] = {}  # a dict, because a damaged page of an index is reported for each of its iterations

    def damaged(damage: Corrupt) -> None:
        damages[str(damage)] = None

    metrics = run.metric_rows(damaged=damaged)
    trajectories = [] if run.is_fit else _trajectories(run, tokens, images, damaged)
    view = run_view(run, name, metrics, damages)
    for damage in view.damages:
        note(f"the report leaves out what it could not read: {damage}")
    return ReportedRun(view=view, trajectories=trajectories)


def _trajectories(run: Run, tokens: int, images: EmbeddedImages, damaged: OnDamage) -> list[TrajectoryDocument]:
    """Samples trajectories of the newest closed iterations."""
    closed = run.state.iteration
    newest = range(max(0, closed - SAMPLED_ITERATIONS), closed)
    frame = run.trajectories(newest, damaged=damaged)
    if "score" in frame:  # missing if all shards of scores are damaged
        frame = frame.dropna(subset=["score"])
    if "score" not in frame or frame.empty:
        return []
    sample = _sample(frame, tokens)
    decode = decoder(run) if sample["response_ids"].notna().any() else None
    scales = scales_of(sample)
    branches = frame["trajectory_id"].map(trajectory_of)
    look = images.of(Images(run.store.objects))
    return [
        trajectory(row, decode, scales, frame[branches == trajectory_of(row["trajectory_id"])].to_dict("records"), look)
        for row in sample.to_dict("records")
    ]


def _sample(frame: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """Samples the same number of rows per iteration: the best, the worst, and others evenly spread by score."""
    longest = int(frame["response_ids"].fillna(frame["response"]).map(len).max())  # characters without tokens
    rows_per_iteration = min(SAMPLED_TRAJECTORIES, tokens // max(longest, 1)) // frame["iteration"].nunique()
    ordered = frame.sort_values(["iteration", "score", "trajectory_id"], ascending=[False, False, True])
    kept: list[int] = []
    for rows in ordered.groupby("iteration", sort=False).indices.values():
        # at least the best and the worst
        chosen = np.linspace(0, len(rows) - 1, min(len(rows), max(rows_per_iteration, 2))).round().astype(int)
        kept += [int(rows[index]) for index in chosen]
    return ordered.iloc[kept]
