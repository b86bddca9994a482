"""Trains a reward model on preferences, the step between supervised fine-tuning and PPO."""

from __future__ import annotations

import numpy as np
from prefect import flow

from ratchet.infra.execution.fine_tuning_run import fitting
from ratchet.infra.progress import note
from ratchet.rlhf import seeding
from ratchet.rlhf.algorithms.objectives import PreferenceObjective
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import RewardTraining
from ratchet.rlhf.data.examples import preferences
from ratchet.rlhf.models.loading import load_scorer
from ratchet.rlhf.models.tokenizers import check_embeddings, load_tokenizer
from ratchet.rlhf.train.model_engine import ModelEngine
from ratchet.rlhf.train.torch_engine import TorchEngine
from ratchet.tasks.fine_tuning_rounds import Fit, fit
from ratchet.tasks.recording import noted


@flow(name="train_reward_model", flow_run_name="{config.run.name}", persist_result=False)
@noted
def train_reward_model(config: RewardTraining, take_over: bool = False) -> dict[str, float]:
    """Start or resume the fit, and write the model's folder; returns the metrics of the last round."""
    check_embeddings(config.model, config.model)
    model = load_scorer(config.model, config.run.seed)
    examples = _pairs(config, config.data, model.config.get_text_config().pad_token_id)
    held_out = None
    if config.validation is not None:
        held_out = _pairs(config, config.validation, model.config.get_text_config().pad_token_id)
    pairs = len(examples) // 2

    def rows(step: int) -> list[int]:
        epoch, batch = divmod(step, steps_per_epoch)
        order = seeding.generator(config.run.seed, "preferences", epoch).permutation(pairs)
        chosen = order[batch * config.batch_pairs : (batch + 1) * config.batch_pairs]
        # the two responses of a pair are neighbours
        return [int(row) for pair in chosen for row in (2 * pair, 2 * pair + 1)]

    steps_per_epoch = -(-pairs // config.batch_pairs)
    with fitting(config, "reward", take_over) as run:
        engine = TorchEngine(
            model,
            "reward",
            dtype=config.model.dtype,
            kernels=config.model.kernels,
            gradient_checkpointing=config.gradient_checkpointing,
        )

        def evaluate() -> dict[str, float]:
            return {} if held_out is None else accuracy(engine, held_out, config.micro_batch_tokens)

        steps = config.epochs * steps_per_epoch
        return fit(run, Fit(config, engine, PreferenceObjective(), examples, steps, rows, evaluate))


def _pairs(config: RewardTraining, url: str, padding: int | None) -> TrajectoryBatch:
    tokenizer = load_tokenizer(config.model)
    examples, left_out = preferences(url, tokenizer, padding=padding, max_tokens=config.max_tokens)
    if left_out:
        note(f"{left_out} pairs of {url} are longer than max_tokens {config.max_tokens}: left out")
    return examples


def accuracy_of(config: RewardTraining) -> dict[str, float]:
    """Returns how well the model that a training starts from ranks its held-out pairs; see `accuracy`."""
    assert config.validation is not None, "there are held-out pairs"
    check_embeddings(config.model, config.model)
    model = load_scorer(config.model, config.run.seed)
    pairs = _pairs(config, config.validation, model.config.get_text_config().pad_token_id)
    engine = TorchEngine(model, "reward", dtype=config.model.dtype, kernels=config.model.kernels)
    return accuracy(engine, pairs, config.micro_batch_tokens)


def accuracy(engine: ModelEngine, pairs: TrajectoryBatch, micro_batch_tokens: int) -> dict[str, float]:
    """Returns how often, and by how much on average, the preferred response of a pair scores higher."""
    outputs = engine.infer(pairs, ("scores",), temperature=1.0, micro_batch_tokens=micro_batch_tokens)["scores"]
    scores = np.asarray(outputs.flatten().to_numpy(zero_copy_only=False)).reshape(-1, 2)
    margin = scores[:, 0] - scores[:, 1]
    return {"val/accuracy": float((margin > 0).mean()), "val/margin": float(margin.mean())}
