"""Fine-tunes a model on prompts and responses, the first step of every RLHF recipe."""

from __future__ import annotations

from prefect import flow

from ratchet.infra.execution.fine_tuning_run import fitting
from ratchet.infra.progress import note
from ratchet.rlhf import seeding
from ratchet.rlhf.algorithms.objectives import SupervisedObjective
from ratchet.rlhf.config import SFTConfig
from ratchet.rlhf.data.chat_turns import treat_special_tokens
from ratchet.rlhf.data.examples import supervised
from ratchet.rlhf.models.loading import load_actor
from ratchet.rlhf.models.tokenizers import check_embeddings, eos_token_ids, load_tokenizer
from ratchet.rlhf.models.vision import vision_of
from ratchet.rlhf.train.torch_engine import TorchEngine
from ratchet.tasks.fine_tuning_rounds import Fit, fit
from ratchet.tasks.recording import noted


@flow(name="sft", flow_run_name="{config.run.name}", persist_result=False)
@noted
def sft(config: SFTConfig, take_over: bool = False) -> dict[str, float]:
    """Start or resume the fit, and write the model's folder; returns the metrics of the last round."""
    tokenizer = load_tokenizer(config.model)
    check_embeddings(config.model, config.model)
    treat_special_tokens(tokenizer, config.special_tokens)
    examples, left_out, images = supervised(
        config.data,
        tokenizer,
        prompt=config.prompt_column,
        response=config.response_column,
        max_tokens=config.max_tokens,
    )
    if left_out:
        note(f"{left_out} examples are longer than max_tokens {config.max_tokens}: left out")

    def rows(step: int) -> list[int]:
        size = min(config.batch_examples, len(examples))
        return seeding.epochs(config.run.seed, "sft", len(examples), step * size, size)

    with fitting(config, "actor", take_over) as run:
        model = load_actor(config.model, config.run.seed)
        ends = eos_token_ids(model.generation_config, tokenizer)
        if len(ends) > 1 and model.generation_config is not None:  # so that generation with the model stops there, too
            model.generation_config.eos_token_id = list(ends)
        engine = TorchEngine(
            model,
            "policy",
            dtype=config.model.dtype,
            kernels=config.model.kernels,
            gradient_checkpointing=config.gradient_checkpointing,
            vision=vision_of(config.model, images.__getitem__),
        )
        return fit(run, Fit(config, engine, SupervisedObjective(), examples, config.steps, rows))
