"""Forks a run at a turn of one of its trajectories: the fork's first iteration continues it from there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.infra.execution.claims import run_url
from ratchet.infra.runs.run import Run
from ratchet.infra.runs.turn_prefixes import iteration_of, turn_prefixes
from ratchet.infra.store.log import RunLog
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.run_store import PROMPTS
from ratchet.rlhf import consent
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.environments.environment import check_returns, load_environment
from ratchet.rlhf.errors import UserError
from ratchet.tasks.analysis.plan import fork_run


@dataclass(frozen=True)
class Branch:
    """A place in a run from which a stored trajectory is continued."""

    trajectory_id: str
    turn: int
    """Number of the policy's turns that are kept."""
    samples: int | None = None
    """Number of continuations; None: `rollout.n` of the run."""
    iteration: int | None = None
    """The fork begins here, with the policy of this iteration; None: in the trajectory's own iteration."""


def branch_run(run: Run, branch: Branch, values: Mapping[str, Any], overrides: Iterable[str] = ()) -> RunConfig:
    """Makes a fork of a run whose first iteration continues a trajectory of the run, and which ends after it.

    All other settings are the run's. The kept turns are the only row of the fork's dataset, which is in its folder.

    Args:
        values: the fork's name and store, and other settings by dotted key.
        overrides: more settings, ``a.b=c``, which count most.

    Returns:
        The fork's config.

    Raises:
        UserError: the trajectory is not there, has no such turn, or its environment cannot be brought to the state
            after it; the fork exists already; or as `fork_run`.
    """
    run.config.require_own("cannot fork it")
    [row] = turn_prefixes(run, branch.trajectory_id, branch.turn)
    # the rollout may have written it ahead of the open iteration
    own = min(iteration_of(branch.trajectory_id), run.state.iteration)
    iteration = own if branch.iteration is None else branch.iteration
    named = run.config.with_values({**_settings(run.config, iteration, branch.samples), **values}, overrides)
    child = ObjectStore(run_url(named.run.store, named.run.name))
    if RunLog(child).read().slot >= 0:
        raise UserError(f"a run exists at {child.url} already: choose another name (--run)")
    config = named.with_values({"data.train": [_path_of(child)]})
    consent.require(run.config, config)
    _check_state(config, branch, row["continues"]["states"])
    child.put(PROMPTS, f"{json.dumps(row, ensure_ascii=False)}\n".encode())
    try:
        fork_run(run, config, iteration, None)
    except BaseException:
        if RunLog(child).read().slot < 0:  # else another command has made this fork meanwhile
            child.delete([PROMPTS])
            child.delete_empty_folders()
        raise
    return config


def _settings(config: RunConfig, iteration: int, samples: int | None) -> dict[str, Any]:
    """Returns the settings in which the fork differs from the run: one prompt, which one iteration answers."""
    total = config.rollout.n if samples is None else samples
    sections = {"actor": config.actor, "critic": config.critic}
    sizes = {name: None if section is None else section.mini_batch_trajectories for name, section in sections.items()}
    return {
        "data.weights": None,
        "data.curriculum": None,
        "data.prompts_per_iteration": 1,
        "rollout.n": total,
        "train.iterations": iteration + 1,
        # a step of the run's size may be larger than the iteration
        **{f"{name}.mini_batch_trajectories": None for name, size in sizes.items() if size and total % size},
    }


def _path_of(child: ObjectStore) -> str:
    """Returns the path of the prompts in the fork's folder, or their URL if the folder is not on this machine."""
    kind, separator, path = child.url.rpartition("://")
    where = str(Path(path).resolve()) if not separator or kind == "file" else child.url
    return f"{where}/{PROMPTS}"


def _check_state(config: RunConfig, branch: Branch, states: list[str]) -> None:
    """Raises UserError if the environment can be neither restored to the state after the turn nor replayed."""
    environment = config.rollout.environment
    if environment is None:
        raise UserError(f"--trajectory {branch.trajectory_id}: it was written with a rollout.environment, and needs it")
    make = load_environment(environment.name)
    check_returns(make, environment.name, f"--trajectory {branch.trajectory_id}")
    if hasattr(make, "restore") and len(states) != branch.turn:
        raise UserError(
            f"--trajectory {branch.trajectory_id}: the state of rollout.environment {environment.name} after turn "
            f"{branch.turn} is not stored, so it cannot be restored: choose a trajectory that has turn_states"
        )
