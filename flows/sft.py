"""Supervised fine-tuning on prompt-response pairs: the step before every RLHF recipe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from infra.progress import report
from rlhf import seeding
from rlhf.algorithms.objectives import SupervisedObjective
from rlhf.batch import TrajectoryBatch, ragged
from rlhf.config import LRSchedule, Model, Section
from rlhf.data.prompts import Prompt, encode, read_parquet
from rlhf.engines.base import Schedule
from rlhf.engines.learning_rate import learning_rate
from rlhf.errors import UserError
from rlhf.models import load_actor, load_tokenizer, save


class SFTConfig(Section):
    """What a supervised run is made of."""

    model: Model = Field(description="the model to start from")
    data: str = Field(description="Parquet with columns prompt [{role, content}] and response")
    output: str = Field(description="folder of the resulting Hugging Face model")
    steps: int = Field(250, gt=0, description="optimizer steps")
    batch_examples: int = Field(128, gt=0, description="examples an optimizer step learns from")
    micro_batch_tokens: int = Field(16384, gt=0, description="tokens computed at once, padding included")
    max_prompt_tokens: int = Field(512, gt=0, description="longest prompt, in tokens")
    lr: float = Field(1e-5, gt=0, description="largest learning rate of AdamW")
    warmup_steps: int = Field(0, ge=0, description="steps over which the rate rises; it then falls to 0 by a cosine")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    seed: int = Field(0, ge=0, description="order of the examples")


@flow(name="sft", flow_run_name="sft {config.output}", persist_result=False)
def sft(config: SFTConfig) -> float:
    """Train and write the model folder; returns the loss of the last tenth of the steps."""
    return supervise(config)


@task(name="supervise", persist_result=False, cache_policy=NO_CACHE)
def supervise(config: SFTConfig) -> float:
    from rlhf.engines.torch_engine import TorchEngine

    tokenizer = load_tokenizer(config.model)
    examples = _read(config, tokenizer)
    engine = TorchEngine(load_actor(config.model), "policy", dtype=config.model.dtype)
    schedule = LRSchedule(
        type="cosine",
        warmup_iterations=config.warmup_steps,
        decay_iterations=max(config.steps - config.warmup_steps, 1),
    )
    losses = []
    for step in range(config.steps):
        draw = seeding.generator(config.seed, "sft", step)
        rows = draw.choice(len(examples), size=min(config.batch_examples, len(examples)), replace=False)
        metrics = engine.update(
            examples.take(rows),
            SupervisedObjective(),
            Schedule(
                lr=learning_rate(config.lr, schedule, step),
                betas=(0.9, 0.999),
                weight_decay=config.weight_decay,
                grad_clip=config.grad_clip,
                micro_batch_tokens=config.micro_batch_tokens,
                mini_batches=(tuple(range(len(rows))),),
                temperature=1.0,
            ),
        )
        losses.append(metrics["sft/loss"])
        report("steps", what=f"supervised steps (loss {losses[-1]:.3f})", done=step + 1, total=config.steps)
    save(engine.model, Path(config.output))
    tokenizer.save_pretrained(config.output)
    return float(np.mean(losses[-max(config.steps // 10, 1) :]))


def _read(config: SFTConfig, tokenizer: object) -> TrajectoryBatch:
    path = Path(config.data)
    if not path.is_file():
        raise UserError(f"{path} does not exist: name a Parquet file of prompts and responses")
    table = read_parquet(path)
    for column in ("prompt", "response"):
        if column not in table.column_names:
            raise UserError(f"{path} has no column {column}: supervised examples are rows of prompt and response")
    prompts, responses = [], []
    pairs = zip(table["prompt"].to_pylist(), table["response"].to_pylist(), strict=True)
    for number, (messages, response) in enumerate(pairs, 1):
        where = f"{path}, row {number}"
        prompt = Prompt(data_source="", messages=messages, ground_truth="", extra_info="", where=where)
        _, ids = encode(prompt, tokenizer, max_tokens=config.max_prompt_tokens, truncation="error")
        prompts.append(ids)
        end = [tokenizer.eos_token_id]  # type: ignore[attr-defined]
        responses.append(tokenizer(response, add_special_tokens=False)["input_ids"] + end)  # type: ignore[operator]
    lengths = np.array([len(response) for response in responses])
    return TrajectoryBatch.of(
        {
            "prompt_ids": prompts,
            "response_ids": responses,
            "loss_mask": ragged(np.ones(lengths.sum(), np.int8), lengths),
        }
    )
