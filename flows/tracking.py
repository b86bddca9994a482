"""Sends metrics to TensorBoard, Weights & Biases, MLflow or trackio, through accelerate's trackers.

A tracker never ends the run: if it fails, a note says so, and the run continues without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ratchet.flows.terminal import visible
from ratchet.infra.progress import note
from ratchet.rlhf.config import RunConfig, Tracker
from ratchet.rlhf.metrics import STEP

if TYPE_CHECKING:
    import pandas as pd
    import wandb
    from accelerate.tracking import GeneralTracker

T = TypeVar("T")
Track = Callable[[int, Mapping[str, float]], None]
Samples = Callable[[int], "pd.DataFrame"]
FOLDER = Path("tracking")
"""The folder of trackers that write files, with a folder for each run."""
SAMPLES = "samples"
"""Name of the table of trajectories in Weights & Biases."""


@contextmanager
def tracking(config: RunConfig, run_id: str, samples: Samples) -> Iterator[Track]:
    """Opens the trackers of `config.tracking`; yields a function that logs the metrics of an iteration.

    Args:
        config: The run's config.
        run_id: Identifies the run across resumes: each tracker has one run for it.
        samples: Returns a few trajectories of an iteration.
    """
    trackers: dict[Tracker, GeneralTracker] = {}
    for name in config.tracking:
        if (tracker := _attempt(name, partial(_open, name, config, run_id))) is not None:
            trackers[name] = tracker

    def track(iteration: int, metrics: Mapping[str, float]) -> None:
        # a copy, since a tracker that fails is removed
        for name, tracker in list(trackers.items()):
            if not _attempt(name, partial(_log, tracker, iteration, metrics, samples)):
                del trackers[name]

    try:
        yield track
    finally:
        for name, tracker in trackers.items():
            _attempt(name, tracker.finish)


def _attempt(name: str, action: Callable[[], T]) -> T | None:
    """Returns the result of a tracker's action; None, after a note, if it fails."""
    try:
        return action()
    except Exception as error:  # a third-party service may raise anything
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        note(f"tracking: {name} failed, and the run continues without it: {first}")
        return None


def _open(name: Tracker, config: RunConfig, run_id: str) -> GeneralTracker:
    from accelerate import PartialState

    PartialState(cpu=True)  # accelerate's trackers ask it whether this is the main process
    tracker = BUILD[name](config, run_id)
    tracker.start()
    if tracker.name == "wandb":
        tracker.run.define_metric("*", step_metric=STEP)
    if tracker.name == "mlflow" and tracker.run_id is None:  # when a run is resumed, it refuses parameters that change
        tracker.store_init_configuration(_flat(config))
    return tracker


def _log(tracker: GeneralTracker, iteration: int, metrics: Mapping[str, float], samples: Samples) -> bool:
    values = {STEP: float(iteration), **metrics}
    if tracker.name == "wandb":
        tracker.log(values | _table(samples(iteration)))  # its own steps continue where a resumed run stopped
    elif tracker.name == "mlflow":
        allowed = {re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_")): value for name, value in values.items()}
        tracker.log(allowed, step=iteration)
    else:
        tracker.log(values, step=iteration)
    return True


def _table(frame: pd.DataFrame) -> dict[str, wandb.Table]:
    import wandb

    if frame.empty:
        return {}
    rows: list[Iterable[object]] = [
        [visible(value) if isinstance(value, str) else value for value in row] for row in frame.to_numpy()
    ]
    return {SAMPLES: wandb.Table(columns=list(frame.columns), data=rows)}


def _tensorboard(config: RunConfig, run_id: str) -> GeneralTracker:
    from accelerate.tracking import TensorBoardTracker

    return TensorBoardTracker(config.run.name, FOLDER)


def _wandb(config: RunConfig, run_id: str) -> GeneralTracker:
    import wandb
    from accelerate.tracking import WandBTracker

    folder = FOLDER / config.run.name
    folder.mkdir(parents=True, exist_ok=True)
    return WandBTracker(
        config.run.project,
        name=config.run.name,
        id=run_id,
        resume="allow",
        group=config.run.group,
        tags=list(config.run.tags),
        config=config.model_dump(mode="json"),
        dir=str(folder),
        settings=wandb.Settings(silent=True, console="off"),
    )


def _mlflow(config: RunConfig, run_id: str) -> GeneralTracker:
    import mlflow
    from accelerate.tracking import MLflowTracker

    runs = []
    if (project := mlflow.get_experiment_by_name(config.run.project)) is not None:
        runs = mlflow.search_runs([project.experiment_id], f"tags.run_id = '{run_id}'", output_format="list")
    return MLflowTracker(
        config.run.project,
        run_id=runs[0].info.run_id if runs else None,
        run_name=config.run.name,
        tags={"run_id": run_id, "group": config.run.group or "", "tags": ", ".join(config.run.tags)},
    )


def _trackio(config: RunConfig, run_id: str) -> GeneralTracker:
    from accelerate.tracking import TrackioTracker

    return TrackioTracker(
        config.run.project,
        name=f"{config.run.name}-{run_id[:8]}",  # a run is continued by its name
        group=config.run.group,
        config=_flat(config),
        resume="allow",
    )


BUILD: dict[Tracker, Callable[[RunConfig, str], GeneralTracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}


def _flat(config: RunConfig) -> dict[str, object]:
    import pandas as pd

    [row] = pd.json_normalize(config.model_dump(mode="json")).to_dict("records")
    return {str(key): value for key, value in row.items()}
