"""Checks that a run can start, or continue, with a config."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ratchet.infra.execution.claims import begin
from ratchet.infra.execution.outside import OutsideInputs
from ratchet.infra.execution.preflight.devices import check_devices
from ratchet.infra.execution.preflight.inputs import check_inputs
from ratchet.infra.execution.preflight.mistakes import check_all, refuse
from ratchet.infra.progress import note
from ratchet.infra.store.records import Claim, RunState
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.config import RunConfig, differences, stored_config, yaml_text
from ratchet.rlhf.config.roles import ROLES
from ratchet.rlhf.distributed.gpus import GPUs
from ratchet.rlhf.errors import UserError, counted


def check_run(
    config: RunConfig,
    store: RunStore,
    outside: OutsideInputs,
    check: Callable[[], None],
    *,
    take_over: bool,
    accept_changes: bool,
    gpus: GPUs | None = None,
) -> RunState:
    """Checks everything that may be wrong on the user's side. Writes nothing, and loads no model.

    Args:
        check: checks the committed stages of the open iteration.
        take_over: another driver may be alive.
        accept_changes: the run may continue with other data, another reward or another algorithm.
        gpus: the GPUs of the run; None: this machine's.

    Returns:
        The run's state; its slot is -1 if the run does not exist.

    Raises:
        UserError: the config, the store or the inputs are wrong, or do not fit the run.
        Fenced: another driver is alive.
    """
    check_all(partial(check_inputs, config), partial(check_devices, config, gpus))
    state = begin(store, config, take_over)
    mistakes = [
        f"the {role}'s model is not the one that run {config.run.name} started with (model.path {config.model.path}, "
        f"model.lora {yaml_text(config.model.lora)}, model.args {yaml_text(config.model.args)}): choose another "
        "run.name, or restore the first model"
        for role, weights in outside.initial_weights.items()
        if (first := state.initial.get(role)) is not None and first.digest != weights.digest
    ]
    if state.claim is not None:
        mistakes += other_averages(stored_config(state.claim.config, "the claim"), config, state.iteration)
    committed = []
    try:
        check()
    except UserError as error:
        committed = [str(error)]
    if state.claim is not None and state.iteration > 0 and not accept_changes:
        mistakes += _other_settings(state.claim, state.iteration, config, outside, can_continue=not committed)
    refuse(mistakes + committed)
    return state


def other_averages(before: RunConfig, config: RunConfig, iteration: int) -> list[str]:
    """Refuses a config in which other weights follow the actor than in the iterations that the run has."""
    return [
        f"{role.follow_key} can be set or removed only before the first iteration, because the average begins there: "
        "start a new run, or `ratchet fork RUN --at 0 --run NEW`"
        for name, role in ROLES.items()
        if iteration and (name in before.averages) != (name in config.averages)
    ]


def _other_settings(
    claim: Claim, iteration: int, config: RunConfig, outside: OutsideInputs, *, can_continue: bool
) -> list[str]:
    """Refuses a config that would learn from something else than the run did."""
    changed = differences(stored_config(claim.config, "the claim").learned_from(), config.learned_from())
    if claim.outside.get("dataset") == outside.digest("dataset"):  # other paths, the same prompts
        changed = [change for change in changed if not change.startswith("data.train ")]
    if not changed:
        return []
    run = config.run.name
    return [
        f"run {run} has {counted(iteration, 'iteration')} with other settings ({'; '.join(changed)}): choose another "
        f"run.name, or continue with the run's own settings (`ratchet resume {run}`)"
        + (", or add --accept-changes" if can_continue else "")
    ]


def say_what_changed(state: RunState, config: RunConfig) -> None:
    """Reports changed settings of a run that may continue, before it is claimed with `config`."""
    if state.claim is None:
        return
    before = stored_config(state.claim.config, "the claim")
    old, new = (settings.model_dump(mode="json", exclude={"run": {"name", "store"}}) for settings in (before, config))
    if changed := differences(old, new):
        note(f"continues with different settings from iteration {state.iteration} on: {'; '.join(changed)}")
