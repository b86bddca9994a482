"""Traces the lineage of a checkpoint: the update that produced it, its inputs, and so on to data, seed and code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ratchet.infra.runs.run import Run
from ratchet.infra.store.log import RunLog
from ratchet.infra.store.manifest import Manifest
from ratchet.infra.store.records import CanaryCheck, Claim, Skip, Weights
from ratchet.rlhf.errors import UserError, counted
from ratchet.tasks.pipeline import update_of


@dataclass(frozen=True)
class Origin:
    """A checkpoint or a stage, and its origins."""

    what: str
    """Title."""
    details: tuple[str, ...] = ()
    """Facts, one per line."""
    made_from: tuple[Origin, ...] = field(default=())


EARLIER = 5
"""Number of updates before the newest that are listed one by one."""


def explain(run: Run, version: int, role: str = "actor") -> Origin:
    """Traces a role's weights: the newest update in full, a few earlier ones in a line each, and the initial model.

    Raises `UserError` if the run does not train the role, or has no such version.
    """
    run.config.require_weights()
    newest = run.state.weights.get(role)
    if update_of(role) is None or newest is None:
        raise UserError(f"the run does not train a {role}")
    if not 0 <= version <= newest.version:
        raise UserError(f"the {role} has versions 0 to {newest.version}; there is no version {version}")
    return Origin(
        f"{role} after {counted(version, 'iteration')}",
        (f"digest {_weights(run, role, version).digest}", _snapshot(run, role, version)),
        tuple(_updates(run, role, version)),
    )


def _updates(run: Run, role: str, version: int) -> Iterator[Origin]:
    """Yields the updates that led to a version, newest first, and the model that the run started with."""
    update, described = update_of(role), set[str]()
    assert update is not None
    oldest = max(0, version - 1 - EARLIER)
    for iteration in reversed(range(oldest, version)):
        committed = run.store.committed_stage(iteration, update.name)
        if committed is None:
            break
        if isinstance(committed, Skip):
            yield Origin(f"iteration {iteration}: {update.name} skipped, {committed.reason}")
            continue
        if not described:
            yield _stage(run, iteration, run.store.manifest(committed), described)
        else:
            yield Origin(f"iteration {iteration}: {update.name}", (f"fingerprint {committed.fingerprint}",))
    first = run.state.initial[role]
    if oldest > first.version:
        command = f"`ratchet explain {run.store.url.rpartition('/')[2]} {oldest}`"
        yield Origin(f"iterations {first.version} to {oldest - 1}: {command} shows the next ones")
    yield Origin(f"the {role} that the run began with", (f"sha256 of the model's files {first.digest}",))


def _stage(run: Run, iteration: int, manifest: Manifest, described: set[str]) -> Origin:
    """Describes a stage with its whole fingerprint; only names it if it is in `described`, to which it is added."""
    title = f"iteration {iteration}: {manifest.stage}"
    if manifest.stage in described:
        return Origin(f"{title} (as above)")
    described.add(manifest.stage)
    parts = manifest.fingerprint.parts
    details = [f"term {manifest.term}, {manifest.seconds:.1f} s, {_output(manifest)}"]
    if (claim := _claim(run, iteration, manifest)) is not None:
        packages = ", ".join(f"{name} {release}" for name, release in claim.packages.items())
        details.append(f"by {claim.host}, {claim.threads} threads, code {claim.code[:16]}, {packages}")
    for name, value in parts.items():
        if not name.startswith(("input.", "stage", "version", "deterministic", "iteration")):
            details.append(f"{name} = {value}")
    if manifest.stage == "generate" and (check := run.store.iteration_state(iteration).canary) is not None:
        details += [_checked(check)] if check.iteration == iteration else []
    details += [f"config.{key} = {value}" for key, value in manifest.config.items()]
    sources = run.store.manifests(iteration)
    inputs = [name.removeprefix("input.") for name in parts if name.startswith("input.")]
    return Origin(title, tuple(details), tuple(_stage(run, iteration, sources[name], described) for name in inputs))


def _checked(check: CanaryCheck) -> str:
    if check.problem is not None:
        return check.problem
    return (
        f"the rollout had the actor's weights of version {check.weights.version}: difference {check.difference:.2g}, "
        f"tolerance {check.tolerance:.2g}"
    )


def _output(manifest: Manifest) -> str:
    if manifest.weights is not None:
        return f"weights {manifest.weights.digest[:16]}"
    return (
        f"{sum(shard.rows for shard in manifest.shards)} rows in {len(manifest.shards)} shards, {manifest.digest[:16]}"
    )


def _claim(run: Run, iteration: int, manifest: Manifest) -> Claim | None:
    """Returns the claim of the driver that committed a stage; None if its term is not among those of the iteration."""
    state = run.store.iteration_state(iteration)
    stage = state.stages[manifest.stage]
    assert not isinstance(stage, Skip), "a skipped stage has no manifest"
    holder = run.store.objects.of_run(stage.manifest.run)
    if manifest.term not in state.open_terms:
        return None
    return RunLog(holder).claim_at(state.open_terms[manifest.term].slot)


def _weights(run: Run, role: str, version: int) -> Weights:
    if version == run.state.weights[role].version:
        return run.state.weights[role]
    return run.store.iteration_state(version).starting[role]


def _snapshot(run: Run, role: str, version: int) -> str:
    roles = run.state.snapshots.get(version, {})
    if role not in roles:
        return "no snapshot: replayed from an older one when needed"
    ref = roles[role]
    return f"snapshot {run.store.objects.of_run(ref.run).url}/{ref.key}"
