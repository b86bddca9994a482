"""Answers and scores held-out prompts with a model folder or a snapshot of a run, without a claim or a commit."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from prefect import flow

from ratchet.flows.overrides import Override
from ratchet.infra.execution.preflight.models import say_attention
from ratchet.infra.execution.preflight.prompts import check_prompts
from ratchet.infra.progress import StageProgress, report
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.calls import Call, RowsCall
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rewards.registry import check_rewards
from ratchet.rlhf.schema import frame_of
from ratchet.tasks.recording import noted, recorded_task
from ratchet.tasks.stages.validate import VALIDATE


@flow(name="evaluate", flow_run_name="evaluate {config.model.path}", persist_result=False)
@noted
def evaluate(config: RunConfig, iteration: int = 0, overrides: Sequence[Override] = ()) -> pd.DataFrame:
    """Answer the prompts of `config.validation` with the model at `config.model`.

    Args:
        config: The model, the prompts and the sampling.
        iteration: The iteration whose random numbers are drawn: those of the validation before it.
        overrides: Changes of single values of the config, such as ``validation.n=4``.

    Returns:
        The columns of `validate`, with a row per trajectory.
    """
    config = config.with_values({}, overrides)
    if config.validation.data is None:
        raise UserError("validation.data is null: name the prompts to evaluate on (--data)")
    say_attention(config.model)
    check_rewards(config.reward)
    return answer(config, iteration)


@recorded_task("answer", "answer")
def answer(config: RunConfig, iteration: int) -> pd.DataFrame:
    # nothing is committed: the rows stay in memory
    worker = Worker(config, RunStore(ObjectStore("memory://evaluate")), ["rollout"])
    try:
        return _answers(config, iteration, worker)
    finally:
        worker.close()


def _answers(config: RunConfig, iteration: int, worker: Worker) -> pd.DataFrame:
    assert config.validation.data is not None
    dataset = worker.resources.dataset((config.validation.data,))
    check_prompts(dataset, config.model, config.data, config.reward, config.rollout.environment)
    shards = -(-len(dataset) // config.rollout.prompts_per_shard)
    requests = [
        RowsCall(
            Call(
                term=0,
                stage=VALIDATE.name,
                iteration=iteration,
                shard=shard,
                config=VALIDATE.config.of(config),
                role="rollout",
                weights=Weights(version=0, digest=""),
            ),
            VALIDATE.compute,
            VALIDATE.writes,
            VALIDATE.begin,
        )
        for shard in range(shards)
    ]
    frames: dict[int, pd.DataFrame] = {}
    report(StageProgress(iteration=iteration, stage="evaluate", done=0, total=shards))
    for shard, output in worker.generated(requests):
        frames[shard] = frame_of(output.batch.table)
        report(StageProgress(iteration=iteration, stage="evaluate", done=len(frames), total=shards))
    # shards complete in any order
    answers: pd.DataFrame = pd.concat([frames[shard] for shard in range(shards)], ignore_index=True)
    return answers
