"""`engine: deepspeed`: ZeRO stages 0 to 3 (arXiv 1910.02054), on GPUs with NCCL or on the CPU with gloo."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch

from ratchet.rlhf.distributed import accelerator, ranks
from ratchet.rlhf.models import activation_checkpointing
from ratchet.rlhf.models.skeleton import materialize
from ratchet.rlhf.models.token_outputs import Head
from ratchet.rlhf.train.engine import OptimizerPlan
from ratchet.rlhf.train.model_engine import ModelEngine, not_finite
from ratchet.rlhf.weights.stored_state import RangeReader
from ratchet.rlhf.weights.tensor_shards import TensorShard

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ratchet.rlhf.models.skeleton import Skeleton

ZeroStage = Literal[0, 1, 2, 3]


class DeepSpeedEngine(ModelEngine):
    """Trains with DeepSpeed.

    With bfloat16 the model itself is in bfloat16; the optimizer keeps float32 weights, and gradients are summed in
    float32. Stage 1 then shards gradients as stage 2 does. In stage 0 the optimizer has no separate weights, so the
    model is in float32 and computes in bfloat16.
    """

    def __init__(
        self,
        model: PreTrainedModel | Skeleton,
        head: Head,
        *,
        stage: ZeroStage = 2,
        offload: bool = False,
        args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Wraps a model.

        Args:
            stage: ZeRO stage: from 1 the optimizer state is sharded, from 2 also gradients, in 3 also parameters.
            offload: keep optimizer state (and in stage 3 parameters) in host memory.
            args: more keys of DeepSpeed's config.
        """
        kept = activation_checkpointing.chosen(options.get("gradient_checkpointing", False), accelerator.device())
        # stage 3's hooks gather parameters within a layer, which selective checkpointing does not allow
        if stage == 3 and kept == "selective":
            kept = True
        super().__init__(model, head, **options | {"gradient_checkpointing": kept})
        ranks.initialized()
        os.environ.setdefault("DS_ACCELERATOR", self.device.type)
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it at every step
        import deepspeed

        warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated", category=FutureWarning)
        # DeepSpeed's CPU collectives would take a minute to compile, and a killed build leaves a lock on which the next
        # build waits forever; gloo works as well
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # without an optimizer there are only parameters to shard, which is stage 3
        stage = stage if self.trainable or stage == 3 else 0
        rounds = self.dtype == "bfloat16" and (stage > 0 or self.is_cast)
        if rounds and stage == 1:  # stage 1's optimizer for float32 gradient sums cannot leave the device
            stage = 2
        self.stage = stage
        given = dict(args or {})
        zero: dict[str, Any] = {**given.get("zero_optimization", {}), "stage": stage}
        host = {"device": "cpu", "pin_memory": accelerator.is_gpu(self.device)}
        if offload:
            zero["offload_optimizer"] = host
        if offload and stage == 3:
            zero["offload_param"] = host
        # its measure of throughput would make a GPU wait twice per micro-batch
        config: dict[str, Any] = {"timers": {"throughput": {"enabled": False}}} | given
        config |= {
            "train_micro_batch_size_per_gpu": 1,  # unused: we mark the end of a mini-batch ourselves
            "gradient_accumulation_steps": 1,
            "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": rounds},
            "data_types": {"grad_accum_dtype": "fp32" if rounds else None},
            "gradient_clipping": 0.0,  # the default is 1; `_step` sets the limit of the plan
            "steps_per_print": 2**62,
        }
        if self._sources and stage == 3:
            self._partition(config, torch.bfloat16 if rounds else torch.float32)
        elif self._sources:  # directly in the type of the computation; the optimizer's weights are read later
            materialize(self.module, self.device, torch.bfloat16 if rounds else torch.float32)
        self.parameters = self._parameters()
        optimizer = self.optimizer_type.build(self.parameters.values()) if self.trainable else None
        self.engine, self.wrapper, _, _ = deepspeed.initialize(model=self.module, optimizer=optimizer, config=config)
        self.optimizer = optimizer
        self.module.in_step = stage == 3
        self._accumulates = False
        """True while there are gradients that no step has consumed."""
        self._read()

    def _partition(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        """Gives memory to one parameter at a time and keeps this rank's share: no rank ever has the whole model."""
        from deepspeed.runtime.zero import Init

        partitioned: list[Any] = []

        def keep_share(parameter: torch.nn.Parameter) -> None:
            if partitioned:
                partitioned[0].convert_to_zero_parameters([parameter])
            else:
                Init(module=torch.nn.ParameterList([parameter]), config_dict_or_path=config)
                partitioned.append(parameter)

        materialize(self.module, self.device, dtype, keep_share)
        for module in self.module.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.device)

    def _call(self, *inputs: Any) -> dict[str, Tensor]:
        casts = self.dtype == "bfloat16" and self.stage == 0
        with torch.autocast(self.device.type, dtype=torch.bfloat16) if casts else nullcontext():
            return self.engine(*inputs)  # type: ignore[no-any-return]

    def place(self, *, model: bool, optimizer: bool) -> None:
        assert self.stage < 3, "the config refuses it: DeepSpeed keeps references to the memory of its shards"
        super().place(model=model, optimizer=optimizer)

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        if self.optimizer is not None and self.stage > 0:  # the optimizer's float32 weights
            for group in self.optimizer.param_groups:
                yield from group["params"]
        yield from super()._optimizer_tensors()

    def _backward(self, loss: Tensor, last: bool) -> None:
        self._accumulates = True
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * ranks.count())  # DeepSpeed averages over ranks; losses must be summed
        if not last:
            self.engine.step()  # only marks the end of a micro-batch

    def _step(self, plan: OptimizerPlan) -> float:
        assert self.optimizer is not None
        plan.optimizer.set(self.optimizer, plan.lr)
        clip = plan.grad_clip or math.inf
        if self.stage == 0:  # gradients are whole, and DeepSpeed does not report their norm
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), clip))
        else:
            self.wrapper.clip_grad = clip
        self.engine.step()
        self._accumulates = False
        if self.stage > 0:
            norm = float(self.engine.get_global_grad_norm())
        if not math.isfinite(norm):
            raise not_finite(norm)
        return norm

    def get(self, kind: str, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter = self.parameters[name]
        tensor: Tensor
        if self.stage == 0 and kind == "model":
            tensor = self.weights_buffers.readable(parameter.detach())
        elif self.stage == 0:
            tensor = self.optimizer_buffers.readable(self._plain_state(parameter)[kind])
        elif kind == "model" and (dtype == parameter.dtype or not self.trainable):
            # DeepSpeed computes with parameters of this type, which it casts from its own after every step
            with GatheredParameters([parameter]) if self.stage == 3 else nullcontext():
                tensor = self.weights_buffers.readable(parameter.detach()).to(self.device, dtype, copy=True)
        elif self.stage < 3:
            tensor = torch.zeros(parameter.numel(), device=self.device)
            for part in self.parts(kind, name):
                first = int(part.starts[0])
                tensor[first : first + part.values.numel()] = part.values.flatten()
            tensor = ranks.summed(tensor).view(parameter.shape)
        elif kind != "model":
            tensor = safe_get_full_optimizer_state(parameter, kind)
        else:
            tensor = safe_get_full_fp32_param(parameter)
        return tensor.to(dtype)

    def parts(self, kind: str, name: str) -> Iterator[TensorShard]:
        from deepspeed import utils

        parameter: Any = self.parameters[name]
        if self.stage == 0:
            yield from TensorShard.of_rank(self.get(kind, name))
        elif self.stage < 3:
            if (mapping := parameter._hp_mapping) is not None:
                fragment = mapping.get_hp_fragment(None if kind == "model" else kind)
                yield TensorShard.flat(self.optimizer_buffers.readable(fragment), mapping.lp_fragment_address.start)
        else:
            if kind != "model":
                fragment = utils.safe_get_local_optimizer_state(parameter, kind)
            elif self.trainable:
                fragment = utils.safe_get_local_fp32_param(parameter)
            else:
                fragment = parameter.ds_tensor.float()
            start = ranks.rank() * parameter.ds_tensor.numel()
            if (count := min(fragment.numel(), parameter.ds_numel - start)) > 0:  # the rest is padding
                yield TensorShard.flat(fragment.flatten()[:count], start)

    def shape(self, name: str) -> tuple[int, ...]:
        parameter: Any = self.parameters[name]
        return tuple(parameter.ds_shape if self.stage == 3 else parameter.shape)

    def _load(self, kind: str, name: str, stored: RangeReader) -> None:
        from deepspeed import utils

        parameter: Any = self.parameters[name]
        if kind == "model":
            self._fill(parameter, stored)
            return
        self._make_state()
        if self.stage == 0:
            TensorShard.flat(self._plain_state(parameter)[kind]).fill(stored)
        elif self.stage < 3:
            for part in self.parts(kind, name):
                part.fill(stored)
        else:
            utils.safe_set_local_optimizer_state(parameter, self._share(parameter, stored), kind)

    def _fill(self, parameter: Any, stored: RangeReader) -> None:
        from deepspeed import utils
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        if self.stage < 3:  # each rank computes with the whole parameter, and may own a part of the optimizer's
            TensorShard.flat(parameter.data).fill(stored)
            if (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
                TensorShard.flat(mapping.get_hp_fragment(None), mapping.lp_fragment_address.start).fill(stored)
            return
        share = self._share(parameter, stored)
        if self.trainable:
            utils.safe_set_local_fp32_param(parameter, share)
        parameter.ds_tensor.data.copy_(share)
        if parameter.ds_status == ZeroParamStatus.AVAILABLE:  # a small one, of which every rank keeps the whole, too
            TensorShard.flat(parameter.data).fill(stored)

    def _share(self, parameter: Any, stored: RangeReader) -> Tensor:
        """Reads this rank's share in stage 3, padded."""
        # DeepSpeed's `safe_set_full_…` fail if a share is nothing but padding
        size, first = parameter.ds_tensor.numel(), ranks.rank() * parameter.ds_tensor.numel()
        share = torch.zeros(size)
        if (last := min(first + size, parameter.ds_numel)) > first:
            share[: last - first] = stored.flat(first, last)
        return share.to(self.device)

    def _plain_state(self, parameter: Tensor) -> dict[str, Tensor]:
        assert self.optimizer is not None
        state: dict[str, Tensor] = self.optimizer.state[parameter]
        return state

    def _reset_optimizer(self) -> None:
        if self.optimizer is None:
            return
        # DeepSpeed keeps gradients in many places; a step clears them all, but all ranks must take it together
        if ranks.largest(int(self._accumulates)):
            self._stand_still()
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def _make_state(self) -> None:
        """Creates the optimizer state, which DeepSpeed does in its first step, by a step that changes no weights."""
        assert self.optimizer is not None
        if not self.optimizer.state:
            self._stand_still()
        for state in self.optimizer.state.values():
            state["step"].fill_(self.steps)

    def _stand_still(self) -> None:
        """Takes a step with learning rate 0; the caller must overwrite the optimizer state."""
        assert self.optimizer is not None
        self.optimizer_type().set(self.optimizer, lr=0.0)
        token = torch.zeros(1, dtype=torch.long, device=self.device)
        with torch.enable_grad():
            [output] = self._call(token[None], None, token, token, 1.0, ()).values()
            self._backward(0 * output.sum(), last=True)
        self.engine.step()
        self._accumulates = False
