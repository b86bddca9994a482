"""Logs metrics to TensorBoard or Weights & Biases, in addition to the store, with accelerate's trackers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlhf.config import RunConfig

Track = Callable[[int, Mapping[str, float]], None]


@contextmanager
def tracking(config: RunConfig) -> Iterator[Track]:
    """A function that logs an iteration's metrics to each of `config.tracking`; files go to ``tracking/<run>``."""
    if not config.tracking:
        yield lambda iteration, metrics: None
        return
    from accelerate import Accelerator

    folder = Path("tracking") / config.run.name
    folder.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=True, log_with=list(config.tracking), project_dir=folder)
    accelerator.init_trackers(config.run.name, init_kwargs={"wandb": {"dir": str(folder), "resume": "allow"}})
    try:
        yield lambda iteration, metrics: accelerator.log(dict(metrics), step=iteration)
    finally:
        accelerator.end_training()
