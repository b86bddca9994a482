"""What a model is fitted to before it meets an iteration: supervised examples, or preferences."""

from __future__ import annotations

from pydantic import Field

from rlhf.config.sections import ModelConfig, RunSection, Section


class FitConfig(Section):
    """What the fits have in common."""

    run: RunSection = Field(RunSection(), description="the fit's name, place and seed: it is committed like any run")
    model: ModelConfig = Field(description="the model to start from")
    data: str = Field(description="the examples: Parquet or JSON lines, any fsspec URL")
    output: str = Field(description="folder of the resulting Hugging Face model")
    micro_batch_tokens: int = Field(16384, gt=0, description="tokens computed at once, padding included")
    lr: float = Field(1e-5, gt=0, description="largest learning rate of AdamW")
    warmup_steps: int = Field(0, ge=0, description="steps over which the rate rises; it then falls to 0 by a cosine")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    gradient_checkpointing: bool = Field(False, description="recompute activations: less memory, more time")
    checkpoint_steps: int = Field(100, gt=0, description="steps between snapshots: what a crash can lose at most")


ELSEWHERE: dict[str, bool | set[str]] = {
    **dict.fromkeys(("output", "micro_batch_tokens", "gradient_checkpointing", "checkpoint_steps"), True),
    **dict.fromkeys(("data", "validation"), True),
    "run": {"name", "store", "single_writer"},
    "model": {"path", "chat_template", "attention"},
}
"""May change while a fit goes on: what computes the same, and where things lie that digests tell apart."""


class SFTConfig(FitConfig):
    """Supervised fine-tuning."""

    data: str = Field(
        description="Parquet or JSON lines with prompt and response (or completion), or with messages; any fsspec URL"
    )
    prompt_column: str = Field("prompt", description="text, or messages {role, content}")
    response_column: str = Field("response", description="text")
    steps: int = Field(250, gt=0, description="optimizer steps")
    batch_examples: int = Field(128, gt=0, description="examples an optimizer step learns from")
    max_tokens: int = Field(
        2048, gt=0, description="longest prompt and response together; longer examples are left out"
    )


class RewardTraining(FitConfig):
    """Training a reward model on preferences."""

    data: str = Field(description="Parquet or JSON lines with prompt, chosen and rejected; any fsspec URL")
    validation: str | None = Field(None, description="pairs that are held out: the share that comes out right")
    epochs: int = Field(1, gt=0, description="passes over the pairs")
    batch_pairs: int = Field(64, gt=0, description="pairs an optimizer step learns from")
    max_tokens: int = Field(2048, gt=0, description="longest prompt and response together; longer pairs are left out")
