"""fit: takes optimizer steps on examples in committed rounds, each continuing from the last committed one."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ratchet.infra.execution.fine_tuning_run import Fitting
from ratchet.infra.progress import StepProgress, report
from ratchet.infra.runs.model_card import fit_card
from ratchet.infra.runs.run import CARD
from ratchet.rlhf.algorithms.objectives import Objective
from ratchet.rlhf.algorithms.optimizers import AdamW
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import LRScheduleConfig, RewardTraining, SFTConfig
from ratchet.rlhf.models.loading import save
from ratchet.rlhf.models.tokenizers import copy_tokenizer
from ratchet.rlhf.train.engine import OptimizerPlan
from ratchet.rlhf.train.learning_rate import learning_rate
from ratchet.rlhf.train.model_engine import ModelEngine, float32_model
from ratchet.tasks.recording import recorded_task


@dataclass(frozen=True)
class Fit:
    """A model, and the examples that it is fitted to."""

    config: SFTConfig | RewardTraining
    engine: ModelEngine
    objective: Objective
    examples: TrajectoryBatch
    steps: int
    rows: Callable[[int], list[int]]
    """Returns the rows of `examples` for a step."""
    evaluate: Callable[[], dict[str, float]] = dict
    """Returns metrics of the model after each round."""


def fit(fitting: Fitting, job: Fit) -> dict[str, float]:
    """Runs the remaining rounds and writes the model's folder; returns the metrics of the last round."""

    @recorded_task("fit", "round {number}")
    def one_round(number: int) -> dict[str, float]:
        return _round(fitting, job)

    fitting.load(job.engine)
    metrics: dict[str, float] = {}
    while job.engine.steps < job.steps:
        metrics = one_round(fitting.round)
    # all rounds were committed before: only the folder may be missing
    metrics = metrics or _last_metrics(fitting)
    _write(job, metrics)
    return metrics


def _round(fitting: Fitting, job: Fit) -> dict[str, float]:
    """Runs and commits `checkpoint_steps` optimizer steps; returns the means of their metrics."""
    config, engine = job.config, job.engine
    schedule = LRScheduleConfig(
        type="cosine",
        warmup_iterations=config.warmup_steps,
        decay_iterations=max(job.steps - config.warmup_steps, 1),
    )
    sums: dict[str, float] = {}
    started, first = time.perf_counter(), engine.steps
    last = min(first + config.checkpoint_steps, job.steps)
    for step in range(first, last):
        fitting.stopping.check()
        rows = job.rows(step)
        step_metrics = engine.update(
            job.examples.take(rows),
            job.objective,
            OptimizerPlan(
                lr=learning_rate(config.lr, schedule, step),
                optimizer=AdamW(weight_decay=config.weight_decay),
                grad_clip=config.grad_clip,
                micro_batch_tokens=config.micro_batch_tokens,
                mini_batches=(tuple(range(len(rows))),),
                temperature=1.0,
            ),
        )
        for name, value in step_metrics.items():
            sums[name] = sums.get(name, 0.0) + value
        loss = next(value for name, value in step_metrics.items() if name.endswith("/loss"))
        report(StepProgress(what=f"steps (loss {loss:.3f})", done=step + 1, total=job.steps))
    metrics = {name: value / (last - first) for name, value in sums.items()} | job.evaluate()
    metrics |= {"step": float(last), "timing_s/steps": time.perf_counter() - started}
    fitting.commit(engine, metrics)
    return metrics


def _write(job: Fit, metrics: Mapping[str, float]) -> None:
    """Writes the model's folder, with a model card; each complete file replaces an older one atomically."""
    output = Path(job.config.output)
    # in the same folder, since a rename is atomic only within a file system
    with tempfile.TemporaryDirectory(dir=output, prefix=".") as name:
        folder = Path(name)
        save(float32_model(job.engine), folder)
        copy_tokenizer(job.config.model, folder)
        (folder / CARD).write_text(fit_card(job.config, metrics), encoding="utf-8")
        for path in sorted(folder.iterdir()):
            if (target := output / path.name).is_dir():
                shutil.rmtree(target)
            path.replace(target)


def _last_metrics(fitting: Fitting) -> dict[str, float]:
    state = fitting.store.iteration_state(fitting.round - 1)
    assert state.metrics is not None
    row = fitting.store.read_shard(state.metrics).to_pylist()[0]
    return {name: value for name, value in row.items() if name != "iteration"}
