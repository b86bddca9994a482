"""Builds train engines from the config, importing an engine's packages only when it is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ratchet.rlhf.config.engines import DeepSpeedConfig, FSDPConfig, MegatronConfig
from ratchet.rlhf.models.token_outputs import Head
from ratchet.rlhf.train.model_engine import ModelEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ratchet.rlhf.config import TrainerConfig
    from ratchet.rlhf.config.sections import Dtype, Kernels
    from ratchet.rlhf.models.skeleton import Skeleton
    from ratchet.rlhf.models.vision import Vision


def train_engine(
    trainer: TrainerConfig,
    model: PreTrainedModel | Skeleton,
    head: Head,
    *,
    dtype: Dtype,
    kernels: Kernels = "torch",
    trainable: bool = True,
    follows_routes: bool = False,
    vision: Callable[[PreTrainedModel], Vision] | None = None,
) -> ModelEngine:
    """Builds the train engine that `trainer.engine` names, of a model with float32 weights or its skeleton.

    With `follows_routes`, tokens go to the experts that a batch names, if it names any. With `vision`, the model sees
    the images of a batch.

    Raises UserError if the model does not support an option of the trainer.
    """
    options: dict[str, Any] = {
        "dtype": dtype,
        "kernels": kernels,
        "trainable": trainable,
        "gradient_checkpointing": trainer.gradient_checkpointing,
        "packing": trainer.packing,
        "share_prompts": trainer.share_prompts,
        "optimizer": trainer.optimizer,
        "follows_routes": follows_routes,
        "vision": vision,
    }
    engine = trainer.engine
    if isinstance(engine, FSDPConfig):
        from ratchet.rlhf.train.fsdp_engine import FSDPEngine

        return FSDPEngine(
            model,
            head,
            offload=engine.offload,
            sequence_parallel=engine.sequence_parallel,
            tensor_parallel=engine.tensor_parallel,
            shard_size=engine.shard_size,
            reshard_after_forward=engine.reshard_after_forward,
            **options,
        )
    if isinstance(engine, MegatronConfig):
        from ratchet.rlhf.train.megatron_engine import MegatronEngine
        from ratchet.rlhf.train.megatron_groups import Layout

        layout = Layout(
            tensor=engine.tensor_parallel,
            pipeline=engine.pipeline_parallel,
            context=engine.context_parallel,
            expert=engine.expert_parallel,
        )
        return MegatronEngine(model, head, layout=layout, distributed_optimizer=engine.distributed_optimizer, **options)
    options["sequence_parallel"] = engine.sequence_parallel
    if isinstance(engine, DeepSpeedConfig):
        from ratchet.rlhf.train.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(
            model, head, stage=engine.zero_stage, offload=engine.offload, args=engine.args, **options
        )
    from ratchet.rlhf.train.torch_engine import TorchEngine

    return TorchEngine(model, head, **options)
