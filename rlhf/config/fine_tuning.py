"""Config of the trainings outside the RL loop: supervised fine-tuning, and reward models on preferences."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ratchet.rlhf.config.section import Section
from ratchet.rlhf.config.sections import CHECKPOINTING, ModelConfig, RunSection, SpecialTokens


class FitConfig(Section):
    """Keys that both trainings share."""

    run: RunSection = Field(RunSection(), description="name, store and seed; the training is committed like any run")
    model: ModelConfig = Field(description="model to start from")
    data: str = Field(description="file of examples: Parquet, Arrow, JSON or CSV, any fsspec URL")
    output: str = Field(description="folder for the resulting Hugging Face model")
    micro_batch_tokens: int = Field(16384, gt=0, description="tokens computed at once, including padding")
    lr: float = Field(1e-5, gt=0, description="largest learning rate of AdamW")
    warmup_steps: int = Field(
        0, ge=0, description="steps over which the learning rate rises from 0; it then falls to 0 as a cosine"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    gradient_checkpointing: Annotated[bool | Literal["selective"] | None, CHECKPOINTING] = Field(
        None,
        description="recompute activations in the backward pass, which saves memory and takes time: true (all within a "
        "layer), selective (every second matrix product, and never attention), false (none), or null: selective on a "
        "GPU, none on a CPU",
    )
    checkpoint_steps: int = Field(100, gt=0, description="steps between snapshots; a crash loses at most this many")


MAY_CHANGE: dict[str, bool | set[str]] = {
    **dict.fromkeys(("output", "micro_batch_tokens", "gradient_checkpointing", "checkpoint_steps"), True),
    **dict.fromkeys(("data", "validation"), True),
    "run": {"name", "store", "deterministic", "single_writer"},
    "model": {"path", "chat_template", "attention", "kernels"},
}
"""Keys that may change when a training resumes: they do not affect the result, or name files that have a digest."""


class SFTConfig(FitConfig):
    """Supervised fine-tuning."""

    data: str = Field(
        description="Parquet, Arrow, JSON or CSV with prompt and response (or completion), or with messages; "
        "any fsspec URL"
    )
    prompt_column: str = Field("prompt", description="column of the prompt: text, or messages {role, content}")
    response_column: str = Field("response", description="column of the response: text, or messages {role, content}")
    special_tokens: SpecialTokens = Field(
        "split",
        description="special tokens of the tokenizer that prompts spell: text like any other (split), "
        "or control tokens (keep)",
    )
    steps: int = Field(250, gt=0, description="number of optimizer steps")
    batch_examples: int = Field(128, gt=0, description="examples per optimizer step")
    max_tokens: int = Field(
        2048, gt=0, description="largest sum of prompt and response tokens; longer examples are left out"
    )


class RewardTraining(FitConfig):
    """Training a reward model on preferences."""

    data: str = Field(description="Parquet, Arrow, JSON or CSV with prompt, chosen and rejected; any fsspec URL")
    validation: str | None = Field(None, description="file of held-out pairs, to measure accuracy; null: none")
    epochs: int = Field(1, gt=0, description="passes over the pairs")
    batch_pairs: int = Field(64, gt=0, description="pairs per optimizer step")
    max_tokens: int = Field(
        2048, gt=0, description="largest sum of prompt and response tokens; longer pairs are left out"
    )
