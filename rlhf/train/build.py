"""Builds train engines from the config; the packages that an engine needs are imported when it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratchet.rlhf.models.token_outputs import Head
from ratchet.rlhf.train.model_engine import ModelEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ratchet.rlhf.config import TrainerConfig
    from ratchet.rlhf.config.sections import Dtype, Kernels
    from ratchet.rlhf.models.skeleton import Skeleton


def train_engine(
    trainer: TrainerConfig,
    model: PreTrainedModel | Skeleton,
    head: Head,
    *,
    dtype: Dtype,
    kernels: Kernels = "torch",
    trainable: bool = True,
) -> ModelEngine:
    """Build the train engine of a model.

    Args:
        trainer: the trainer's section of the config.
        model: the model with float32 weights, or its skeleton.
        head: outputs of the model.
        dtype: type of the computation.
        kernels: what computes the layers.
        trainable: whether the model is trained; False for a reference.

    Returns:
        The engine that `trainer.engine` names.

    Raises:
        UserError: the model does not support an option of the trainer.
    """
    options: dict[str, Any] = {
        "dtype": dtype,
        "kernels": kernels,
        "trainable": trainable,
        "gradient_checkpointing": trainer.gradient_checkpointing,
        "packing": trainer.packing,
        "share_prompts": trainer.share_prompts,
        "sequence_parallel": trainer.sequence_parallel,
        "optimizer": trainer.optimizer,
    }
    if trainer.engine == "fsdp":
        from ratchet.rlhf.train.fsdp_engine import FSDPEngine

        return FSDPEngine(
            model,
            head,
            offload=trainer.offload,
            tensor_parallel=trainer.tensor_parallel,
            shard_size=trainer.shard_size,
            reshard_after_forward=trainer.reshard_after_forward,
            **options,
        )
    if trainer.engine == "megatron":
        from ratchet.rlhf.train.megatron_engine import MegatronEngine
        from ratchet.rlhf.train.megatron_groups import Layout

        return MegatronEngine(
            model,
            head,
            layout=Layout(
                tensor=trainer.tensor_parallel,
                pipeline=trainer.pipeline_parallel,
                context=trainer.context_parallel,
                expert=trainer.expert_parallel,
            ),
            distributed_optimizer=trainer.distributed_optimizer,
            **options,
        )
    if trainer.engine == "deepspeed":
        from ratchet.rlhf.train.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(model, head, stage=trainer.zero_stage, offload=trainer.offload, **options)
    from ratchet.rlhf.train.torch_engine import TorchEngine

    return TorchEngine(model, head, **options)
