"""Runs one PPO iteration: every stage of the pipeline, in order."""

from prefect import flow

from ratchet.flows.prefect_pages import show_iteration, shown, untagged
from ratchet.infra.execution.driver import Driver, driving
from ratchet.infra.execution.epochs import with_iterations
from ratchet.infra.execution.executors import StageHandle
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import NotFinite
from ratchet.tasks.ahead import finish_ahead, generations
from ratchet.tasks.close import finalize
from ratchet.tasks.fingerprints import check_open_iteration
from ratchet.tasks.pipeline import dependencies, stages_of
from ratchet.tasks.recording import noted
from ratchet.tasks.reuse_rollouts import reuse_rollouts
from ratchet.tasks.runner import check_not_given_up, finish, skip_update, skip_what_is_left, start
from ratchet.tasks.stage import AnyUpdateStage, UpdateStage
from ratchet.tasks.stages.generate import GENERATE
from ratchet.tasks.stages.validate import VALIDATE


@flow(name="iteration", flow_run_name="{config.run.name} · it {k}", persist_result=False, validate_parameters=False)
@noted
def iteration(config: RunConfig, k: int) -> dict[str, float]:
    """Run or resume iteration `k` of a run; returns its metrics."""
    config = with_iterations(config)
    with (
        untagged(),
        driving(config, dependencies(config), check=check_open_iteration) as driver,
        shown(config.run.name),
    ):
        if config.validates(k):
            start(driver, VALIDATE, k, {})
            finish(driver)
        generated = generations(driver, k) if config.data.generations is None else reuse_rollouts(driver, k)
        try:
            check_not_given_up(driver, k)
            assert generated is not None  # an iteration that was given up has raised
            run_stages(driver, k, generated)
        except NotFinite as error:
            skip_what_is_left(driver, k, error)
        finish_ahead(driver, k)
        metrics = finalize(driver, k)
        show_iteration(driver, k, metrics)
        return metrics


def run_stages(driver: Driver, k: int, generated: StageHandle) -> None:
    """Starts all stages after `generate`, each of which computes as its inputs are committed, and waits for them."""
    handles, skipped = {GENERATE.name: generated}, list[tuple[AnyUpdateStage, str]]()
    for stage in stages_of(driver.config):
        if stage in (VALIDATE, GENERATE):
            continue
        if isinstance(stage, UpdateStage) and (reason := stage.skipped(driver.config, k)) is not None:
            skipped.append((stage, reason))
        else:
            handles[stage.name] = start(driver, stage, k, handles)
    finish(driver)
    # last: a skip gives a role's weights their next version, and the other stages compute with this one
    for stage, reason in skipped:
        skip_update(driver, stage, k, reason)
