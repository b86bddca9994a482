"""close: writes the snapshot that is due, the iteration's metrics and the index, and commits them in one record.

A snapshot in the background has its own record, which follows.
"""

from __future__ import annotations

import time

from infra.execution.driver import Driver
from infra.progress import IterationClosed, report
from infra.store.records import Commit
from tasks.pipeline import in_order
from tasks.recording import recorded_task
from tasks.restore import ensure_weights


@recorded_task("close")
def finalize(driver: Driver, iteration: int) -> dict[str, float]:
    """Commit the end of an iteration; returns its metrics."""
    store, config = driver.store, driver.config
    metrics = iteration_metrics(driver, iteration)
    if driver.state.iteration > iteration:  # the record of an earlier try was written after all
        return metrics
    version = iteration + 1
    commits: list[Commit] = []
    last = version == config.iterations
    is_begun = driver.snapshots.being_written == version  # by an earlier try
    if not is_begun:
        driver.snapshots.settle(wait=False)
    if config.train.updates and (last or is_begun or driver.snapshots.is_due(version)):
        if not is_begun:
            driver.snapshots.settle(wait=True)  # one at a time
        driver.stopping.check()
        started = time.perf_counter()
        if not is_begun:
            with driver.restoring:  # nobody loads other weights before they are copied
                for role in config.trained:
                    ensure_weights(driver, role, driver.state.weights[role])
                driver.snapshots.begin(version)
        if not config.checkpoint.background or last:  # after the last iteration there is no work to overlap with
            commits = driver.snapshots.finish()
        metrics["timing_s/snapshot"] = time.perf_counter() - started
    metrics |= driver.weight_sync.take().metrics()
    store.close(metrics, *commits)
    report(IterationClosed(iteration=iteration, metrics=metrics))
    return metrics


def iteration_metrics(driver: Driver, iteration: int) -> dict[str, float]:
    """The metrics of an iteration's stages, and the seconds that each stage computed."""
    metrics: dict[str, float] = {}
    manifests = in_order(driver.store.manifests(iteration))
    for name, manifest in manifests.items():
        metrics |= manifest.metrics
        metrics[f"timing_s/{name}"] = manifest.seconds
    if manifests:
        began, ended = ([getattr(manifest, name) for manifest in manifests.values()] for name in ("began", "ended"))
        metrics["perf/iteration_s"] = max(ended) - min(began)
    metrics["timing_s/stages"] = sum(value for name, value in metrics.items() if name.startswith("timing_s/"))
    if "perf/response_tokens" in metrics:
        metrics["perf/response_tokens_per_s"] = metrics["perf/response_tokens"] / max(metrics["timing_s/stages"], 1e-9)
    return metrics
