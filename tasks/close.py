"""close: commits the end of an iteration in one record, with the snapshot that is due, its metrics and the index.

A snapshot that is written in the background has its own record, which follows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ratchet.infra.execution.driver import Driver
from ratchet.infra.progress import IterationClosed, report
from ratchet.infra.store.manifest import Manifest
from ratchet.infra.store.records import Commit, StageCommit
from ratchet.rlhf.metrics import names, timer
from ratchet.tasks.pipeline import in_order
from ratchet.tasks.recording import recorded_task
from ratchet.tasks.restore import ensure_weights
from ratchet.tasks.stages.validate import validation_columns


@recorded_task("close")
def finalize(driver: Driver, iteration: int) -> dict[str, float]:
    """Commits the end of an iteration; returns its metrics."""
    store, config = driver.store, driver.config
    metrics = iteration_metrics(driver, iteration)
    if driver.state.iteration > iteration:  # the record of an earlier attempt was written after all
        return metrics
    version = iteration + 1
    commits: list[Commit] = []
    last = version == config.iterations
    is_begun = driver.snapshots.being_written == version  # by an earlier attempt
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
        metrics["timing_s/save_checkpoint"] = time.perf_counter() - started
    metrics |= driver.weight_sync.take().metrics()
    if (checked := driver.state.canary) is not None and checked.iteration == iteration:
        metrics |= {
            "canary/difference": checked.difference,
            "canary/tolerance": checked.tolerance,
            "canary/problem": float(checked.problem is not None),
        }
    store.close(metrics, *commits, columns=names(validation_columns(driver)))
    report(IterationClosed(iteration=iteration, metrics=metrics))
    return metrics


def iteration_metrics(driver: Driver, iteration: int) -> dict[str, float]:
    """Collects the metrics of an iteration's stages, and the seconds that each stage computed.

    Times and speeds are those of this run: they leave out stages that are shared with another run.
    """
    metrics: dict[str, float] = {}
    manifests = in_order(driver.store.manifests(iteration))
    commits = driver.store.iteration_state(iteration).stages
    own: list[Manifest] = []
    for name, manifest in manifests.items():
        metrics |= manifest.metrics
        commit = commits[name]
        if isinstance(commit, StageCommit) and commit.manifest.run is None:
            own.append(manifest)
            metrics[timer(name)] = manifest.seconds
    computing = metrics["timing_s/stages"] = sum(manifest.seconds for manifest in own)
    elapsed = _elapsed(own)
    metrics |= {"timing_s/step": elapsed, "perf/time_per_step": elapsed}
    if "perf/response_tokens" in metrics:
        tokens = metrics["perf/total_num_tokens"] = metrics["perf/prompt_tokens"] + metrics["perf/response_tokens"]
        # a speed needs the time of every stage
        if len(own) == len(manifests):
            metrics["perf/throughput"] = tokens / max(elapsed, 1e-9) / driver.config.devices
            metrics["perf/response_tokens_per_s"] = metrics["perf/response_tokens"] / max(computing, 1e-9)
    return metrics


def _elapsed(manifests: Iterable[Manifest]) -> float:
    """Returns the seconds from the start of the first stage to the end of the last, without pauses between drivers."""
    spans: dict[int, list[float]] = {}
    for manifest in manifests:  # an attempt begins and ends with one driver
        spans.setdefault(manifest.term, []).extend((manifest.began, manifest.ended))
    return sum(max(times) - min(times) for times in spans.values())
