"""One PPO iteration: every stage, in order."""

from prefect import flow

from flows.prefect_pages import show_iteration, shown, untagged
from infra.driver import driving
from infra.lanes import Output
from rlhf.config import RunConfig
from rlhf.errors import NotFinite
from tasks.advantages import advantages
from tasks.ahead import finish_ahead, generations
from tasks.borrow import borrow
from tasks.close import close
from tasks.fingerprint import check_open_iteration
from tasks.greedy_baseline import greedy_baseline
from tasks.old_log_probs import old_log_probs
from tasks.recording import noted
from tasks.ref_log_probs import ref_log_probs
from tasks.reward_model import reward_model
from tasks.score import score
from tasks.select import select
from tasks.stage import check_not_given_up, finish, skip_update, skip_what_is_left
from tasks.update_actor import update_actor
from tasks.update_critic import update_critic
from tasks.validate import validate
from tasks.values import values


@flow(name="iteration", flow_run_name="{config.run.name} · it {k}", persist_result=False, validate_parameters=False)
@noted
def iteration(config: RunConfig, k: int) -> dict[str, float]:
    """Run iteration `k` of a run, or what is left of it; returns its metrics."""
    with untagged(), driving(config, check=check_open_iteration), shown(config.run.name):
        if config.validates_before(k):
            validate(k)
            finish()
        generated = generations(k) if config.data.generations is None else borrow(k)
        try:
            check_not_given_up(k)
            assert generated is not None
            stages(config, k, generated)
        except NotFinite as error:
            skip_what_is_left(k, error)
        finish_ahead(k)
        metrics = close(k)
        show_iteration(k, metrics)
        return metrics


def stages(config: RunConfig, k: int, generated: Output) -> None:
    """Start every stage; each computes as soon as what it reads is committed, where its role's models are."""
    judged = reward_model(k, generated) if config.reward.model is not None else None
    scored = score(k, generated, judged)
    if not config.train.updates:
        finish()
        return skip_update("actor", k, "this run only scores")

    chosen = select(k, generated, scored) if config.selects else None
    greedy = greedy_baseline(k, generated, chosen) if config.needs_greedy_scores else None
    old = old_log_probs(k, generated, chosen) if config.needs_old_log_probs else None
    ref = ref_log_probs(k, generated, chosen) if config.needs_reference else None
    value = values(k, generated, chosen) if config.needs_critic else None
    advantage = advantages(k, generated, chosen, scored, greedy, old, ref, value)

    if config.needs_critic:
        update_critic(k, generated, chosen, advantage, value)
    if not config.warms_up(k):
        update_actor(k, generated, chosen, advantage, old, ref)
    finish()
    if config.warms_up(k):
        skip_update("actor", k, "the critic warms up")
