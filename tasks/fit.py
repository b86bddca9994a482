"""fit: a round of optimizer steps on examples, from the state that the last committed round left."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.execution.fitting import Fitting
from infra.progress import StepProgress, report
from rlhf.algorithms.objectives import Objective
from rlhf.batch import TrajectoryBatch
from rlhf.config import FitConfig, LRScheduleConfig
from rlhf.engines.base import OptimizerPlan
from rlhf.engines.learning_rate import learning_rate
from rlhf.engines.model_engine import ModelEngine
from rlhf.engines.optimizers import AdamW
from rlhf.models import load_tokenizer, save
from tasks.recording import recorded_task


@dataclass(frozen=True)
class Fit:
    """What is fitted to what."""

    config: FitConfig
    engine: ModelEngine
    objective: Objective
    examples: TrajectoryBatch
    steps: int
    rows: Callable[[int], list[int]]
    """Of the examples, those that a step learns from."""
    evaluate: Callable[[], dict[str, float]] = dict
    """Metrics of the model as it is, after each round."""


def fit(fitting: Fitting, what: Fit) -> dict[str, float]:
    """All rounds that are left, and the model's folder; returns the last round's metrics."""

    @recorded_task("fit", "round {number}")
    def one_round(number: int) -> dict[str, float]:
        return _round(fitting, what)

    fitting.load(what.engine)
    metrics: dict[str, float] = {}
    while what.engine.steps < what.steps:
        metrics = one_round(fitting.round)
    _write(what)
    return metrics or _last_metrics(fitting)


def _round(fitting: Fitting, what: Fit) -> dict[str, float]:
    """`checkpoint_steps` optimizer steps, committed; returns the means of their metrics."""
    config, engine = what.config, what.engine
    schedule = LRScheduleConfig(
        type="cosine",
        warmup_iterations=config.warmup_steps,
        decay_iterations=max(what.steps - config.warmup_steps, 1),
    )
    sums: dict[str, float] = {}
    started, first = time.perf_counter(), engine.steps
    last = min(first + config.checkpoint_steps, what.steps)
    for step in range(first, last):
        fitting.stopping.check()
        rows = what.rows(step)
        found = engine.update(
            what.examples.take(rows),
            what.objective,
            OptimizerPlan(
                lr=learning_rate(config.lr, schedule, step),
                optimizer=AdamW(weight_decay=config.weight_decay),
                grad_clip=config.grad_clip,
                micro_batch_tokens=config.micro_batch_tokens,
                mini_batches=(tuple(range(len(rows))),),
                temperature=1.0,
            ),
        )
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value
        loss = next(value for name, value in found.items() if name.endswith("/loss"))
        report(StepProgress(what=f"steps (loss {loss:.3f})", done=step + 1, total=what.steps))
    metrics = {name: value / (last - first) for name, value in sums.items()} | what.evaluate()
    metrics |= {"step": float(last), "timing_s/steps": time.perf_counter() - started}
    fitting.commit(engine, metrics)
    return metrics


def _write(what: Fit) -> None:
    """The model's folder: each file is whole, and takes the place of an older one at once."""
    output = Path(what.config.output)
    with tempfile.TemporaryDirectory(dir=output, prefix=".") as name:
        folder = Path(name)
        save(what.engine.model, folder)
        load_tokenizer(what.config.model).save_pretrained(folder)
        for path in sorted(folder.iterdir()):
            if (there := output / path.name).is_dir():
                shutil.rmtree(there)
            path.replace(there)


def _last_metrics(fitting: Fitting) -> dict[str, float]:
    state = fitting.store.iteration_state(fitting.round - 1)
    assert state.metrics is not None
    row = fitting.store.read_shard(state.metrics).to_pylist()[0]
    return {name: value for name, value in row.items() if name != "iteration"}
