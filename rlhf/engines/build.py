"""From a trainer's section of the config to its engine; what an engine needs is imported when it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf.engines.model_engine import Dtype, ModelEngine
from rlhf.engines.token_outputs import Head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlhf.config import Trainer


def train_engine(
    trainer: Trainer, model: PreTrainedModel, head: Head, *, dtype: Dtype, trainable: bool = True
) -> ModelEngine:
    options: dict[str, Any] = {
        "dtype": dtype,
        "trainable": trainable,
        "gradient_checkpointing": trainer.gradient_checkpointing,
        "packing": trainer.packing,
        "sequence_parallel": trainer.sequence_parallel,
    }
    if trainer.engine == "fsdp":
        from rlhf.engines.fsdp_engine import FSDPEngine

        return FSDPEngine(model, head, offload=trainer.offload, tensor_parallel=trainer.tensor_parallel, **options)
    if trainer.engine == "deepspeed":
        from rlhf.engines.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(model, head, stage=trainer.zero_stage, offload=trainer.offload, **options)
    from rlhf.engines.torch_engine import TorchEngine

    return TorchEngine(model, head, **options)
