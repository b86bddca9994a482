"""`engine: megatron`: Megatron-Core's layers, its parallelism, and its distributed optimizer.

Ranks split matrices and the head's vocabulary (tensor parallelism, arXiv 1909.08053), layers (pipeline parallelism with
1F1B, arXiv 2104.04473), sequences (context parallelism, arXiv 2407.21783) or experts (arXiv 2006.16668). Other ranks
have copies of the model and other trajectories; with the distributed optimizer they shard its float32 weights and
moments (ZeRO-1, arXiv 1910.02054).

The base class's model stays a skeleton, which names the tensors as on the hub. Weights, moments and digests are those
of these tensors; `ratchet.rlhf.models.megatron_layout` maps their elements to Megatron's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.distributed import accelerator, ranks
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models import activation_checkpointing, megatron_model
from ratchet.rlhf.models.megatron_layout import EXPERTS, TensorBlock, local_layout, parts_between, refusal
from ratchet.rlhf.models.routes import no_experts
from ratchet.rlhf.models.skeleton import Skeleton
from ratchet.rlhf.models.token_outputs import Head, TokenOutputs, VocabularyShare
from ratchet.rlhf.train.engine import InferencePlan, OptimizerPlan
from ratchet.rlhf.train.megatron_groups import Layout, MegatronGroups
from ratchet.rlhf.train.micro_batches import MicroBatch
from ratchet.rlhf.train.model_engine import LossOf, ModelEngine, not_finite
from ratchet.rlhf.weights.stored_state import RangeReader, StoredState
from ratchet.rlhf.weights.tensor_shards import TensorShard

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ratchet.rlhf.algorithms.objectives import Objective


class MegatronOutputs(TokenOutputs):
    """Outputs of a decoder of Megatron; on all but the last stage of a pipeline, its hidden states."""

    decoder: megatron_model.Decoder

    def of_hidden(
        self, hidden: Tensor, time: int, at: Tensor, targets: Tensor, temperature: float, outputs: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """Computes outputs from the hidden states of the last stage; `time` is the sequences' length."""
        chosen = self.decoder.chosen(hidden, time, at)
        if self.head == "policy":
            computed = self._of_policy(chosen, self.decoder.own(targets), temperature, outputs)
        else:
            values = self.decoder.output_layer(chosen)[:, 0].float()
            computed = {"values" if self.head == "value" else "scores": values}
        return {name: self.decoder.gathered(values, len(at)) for name, values in computed.items()}

    def _of_tokens(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        at: Tensor,
        targets: Tensor,
        temperature: float,
        outputs: tuple[str, ...],
        copies: Tensor | None,
        top: Tensor | int,
        **attend: Any,
    ) -> dict[str, Tensor]:
        assert position_ids is None and copies is None and not attend, "sequences are padded on the right"
        hidden = self.decoder.hidden(input_ids)
        return self.of_hidden(hidden, input_ids.shape[1], at, targets, temperature, outputs)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden) if hasattr(self, "decoder") else super()._logits(hidden)


class MegatronEngine(ModelEngine):
    """Trains with Megatron-Core."""

    module: MegatronOutputs
    outputs_type = MegatronOutputs

    def __init__(
        self,
        model: PreTrainedModel | Skeleton,
        head: Head,
        *,
        layout: Layout = Layout(),  # noqa: B008  (it is frozen)
        distributed_optimizer: bool = True,
        **options: Any,
    ) -> None:
        """Builds this rank's part of a model and reads its weights.

        Raises:
            UserError: there is no GPU, or Megatron does not support the model in this layout.
        """
        try:
            accelerator.check_cuda()
        except (AssertionError, RuntimeError) as error:
            cause = str(error).partition("\n")[0]
            raise UserError(f"engine megatron needs a GPU ({cause}): use engine fsdp") from None
        kept = activation_checkpointing.chosen(options.get("gradient_checkpointing", False), accelerator.device())
        # the decoder expects sequences that are padded on the right
        options |= {"packing": False, "share_prompts": False}
        follows_routes = options.pop("follows_routes", False)
        skeleton = Skeleton.of(model)
        config = skeleton.model.config.get_text_config()
        self.groups = MegatronGroups.of(layout)
        place = self.groups.place
        if reason := refusal(config, place):
            raise UserError(reason)
        super().__init__(skeleton.emptied(), head, **options)
        self.share, self.counts = self.groups.share, self.groups.counts
        self.groups.enter()
        computes = torch.bfloat16 if self.dtype == "bfloat16" else torch.float32
        self.parameters = self._parameters()
        self._names = {parameter: name for name, parameter in self.parameters.items()}
        self.decoder = megatron_model.decoder(
            self.model, head, place, computes, self.device, recompute=kept if self.trainable else False
        )
        self.decoder.train(self.trainable and bool(kept))  # only affects recomputation
        self.decoder.requires_grad_(self.trainable)
        self.module.decoder = self.decoder
        if follows_routes:
            if not self.decoder.config.num_moe_experts:
                raise UserError(no_experts(config.model_type))
            self.module.routers = megatron_model.FollowingRouters(
                self.decoder, recomputes=self.trainable and bool(kept)
            )
        if head == "policy" and place.is_last_stage and place.tensors > 1:
            share = config.vocab_size // place.tensors
            self.module.vocabulary = VocabularyShare(self.groups.tensors, share * place.tensor, place.tensors)
        local = dict(self.decoder.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        blocks_of = local_layout(config, shapes, place, fused=megatron_model.has_transformer_engine())
        assert local.keys() == blocks_of.keys(), f"of other parameters: {sorted(local.keys() ^ blocks_of.keys())}"
        self._places: dict[str, list[tuple[torch.nn.Parameter, TensorBlock]]] = {name: [] for name in self.parameters}
        """This rank's elements of each tensor: Megatron's parameters, and the blocks of them."""
        for name, blocks in blocks_of.items():
            assert blocks[-1].end == local[name].numel(), f"{name} has another size"
            # Megatron sets it where it also initializes; gradients of what is not split are counted once in the norm
            local[name].tensor_model_parallel = blocks[0].is_split
            if EXPERTS in name and not blocks[0].is_split:  # each rank's gradient is that of its own tokens
                local[name].sequence_parallel = True
            for block in blocks:
                self._places[block.hub].append((local[name], block))
        self.optimizer = None
        if self.trainable:
            self._build_optimizer(distributed_optimizer, computes)
        self._read()

    def _build_optimizer(self, distributed: bool, computes: torch.dtype) -> None:
        self.replica = DistributedDataParallel(
            self.decoder.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=distributed
            ),
            self.decoder,
        )
        self.stepper = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.0,  # each step sets it, and the options of the plan
                weight_decay=0.0,
                bf16=computes == torch.bfloat16,
                params_dtype=computes,
                use_distributed_optimizer=distributed,
            ),
            [self.replica],
            use_gloo_process_groups=False,
        )
        self._free_gradients()

    # Computing.

    @property
    def output_layer(self) -> torch.nn.Module:
        """The module that computes this rank's part of the logits."""
        return self.decoder.output_layer  # type: ignore[no-any-return]

    def infer_each(self, batches: Sequence[TrajectoryBatch], plan: InferencePlan) -> list[dict[str, pa.Array]]:
        assert not plan.top_k, "the config refuses it: each rank has a part of the vocabulary"
        self.groups.enter()
        return super().infer_each(batches, plan)

    def update(self, batch: TrajectoryBatch, objective: Objective, plan: OptimizerPlan) -> dict[str, float]:
        self.groups.enter()
        try:
            return super().update(batch, objective, plan)
        finally:
            if self.trainable:
                self._free_gradients()

    def _outputs(
        self, micro_batches: Sequence[MicroBatch], names: tuple[str, ...], temperature: float
    ) -> Iterator[tuple[MicroBatch, dict[str, Tensor]]]:
        if self.groups.place.stages == 1:
            yield from super()._outputs(micro_batches, names, temperature)
            return
        computed: list[dict[str, Tensor]] = []

        def keep(number: int, micro: MicroBatch, outputs: dict[str, Tensor]) -> Tensor:
            computed.append(outputs)
            return next(iter(outputs.values())).sum()

        with torch.no_grad():
            self._run(micro_batches, names, temperature, keep, forward_only=True)
        for number, micro in enumerate(micro_batches):
            nothing = torch.zeros(len(micro.targets), device=self.device)
            yield micro.to(self.device), computed[number] if computed else dict.fromkeys(names, nothing)

    def _accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        names: tuple[str, ...],
        temperature: float,
        loss_of: LossOf,
        *,
        with_router: bool,
    ) -> None:
        for gradients in self._gradients():
            # freed between updates by `_free_gradients`
            gradients.untyped_storage().resize_(gradients.numel() * gradients.itemsize)
        self.replica.zero_grad_buffer()
        if self.groups.place.stages == 1:
            super()._accumulate(micro_batches, names, temperature, loss_of, with_router=with_router)
        else:
            self._run(micro_batches, names, temperature, loss_of, forward_only=False)
        finalize_model_grads([self.replica])

    def _backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        names: tuple[str, ...],
        temperature: float,
        loss_of: LossOf,
        *,
        forward_only: bool,
    ) -> None:
        """Passes micro-batches through the pipeline; the last stage calls `loss_of` for each, in order."""
        assert not self.weights_buffers.in_use, "the weights are not on the device"

        def step(numbers: Iterator[int], _: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number = next(numbers)
            micro = micro_batches[number].to(self.device)
            if self.module.routers is not None:
                self.module.routers.follow(micro.routes)
            hidden = self.decoder.hidden(micro.input_ids)
            if not self.groups.place.is_last_stage:
                return hidden, _no_loss

            def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                time = micro.input_ids.shape[1]
                outputs = self.module.of_hidden(hidden, time, micro.at, micro.targets, temperature, names)
                return loss_of(number, micro, outputs), torch.ones((), dtype=torch.int), {}

            return hidden, loss

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(range(len(micro_batches))),
            model=[self.decoder],
            num_microbatches=len(micro_batches),
            seq_length=1,  # the shapes are sent with the tensors
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _summed(self, sums: dict[str, Tensor]) -> dict[str, float]:
        if self.groups.place.stages > 1:  # only the last stage has metrics, and summing is collective
            for names in ranks.gathered(list(sums)):
                for name in names:
                    sums.setdefault(name, torch.zeros((), device=self.device))
            sums = dict(sorted(sums.items()))
        return super()._summed(sums)

    def _step(self, plan: OptimizerPlan) -> float:
        for part in self.stepper.chained_optimizers:
            plan.optimizer.set(part.optimizer, plan.lr)
        self.stepper.config.clip_grad = plan.grad_clip or math.inf
        _, norm, _ = self.stepper.step()
        self.stepper.zero_grad()
        norm = float(norm)
        if not math.isfinite(norm):
            raise not_finite(norm)
        return norm

    def _free_gradients(self) -> None:
        self.stepper.zero_grad()
        for gradients in self._gradients():
            gradients.untyped_storage().resize_(0)

    def _gradients(self) -> Iterator[Tensor]:
        """Yields the gradient buffers."""
        for buffer in (*self.replica.buffers, *self.replica.expert_parallel_buffers):
            yield buffer.grad_data

    # State.

    def parts(self, kind: str, name: str) -> Iterator[TensorShard]:
        for parameter, block in self._places[name]:
            if block.is_first:
                values, first = self._held(kind, parameter)
                if not self._is_sharded:  # each copy yields its share of the elements
                    copies = self.groups.copies_of_experts if _is_of_expert(parameter) else self.groups.copies
                    number, count = copies.rank(), copies.size()
                    first, last = len(values) * number // count, len(values) * (number + 1) // count
                    values = values[first:last]
                for _, part in parts_between(values, first, [block]):
                    yield TensorShard(part.values.float(), part.starts)

    @property
    def _is_sharded(self) -> bool:
        """True if copies of the model shard the optimizer's weights and state."""
        return self.trainable and isinstance(self.stepper.chained_optimizers[0], DistributedOptimizer)

    def _held(self, kind: str, parameter: torch.nn.Parameter) -> tuple[Tensor, int]:
        """Returns this rank's share of a parameter's optimizer weights or state, flat, and its offset."""
        main, first = self._main(parameter)
        if main is None:
            return torch.zeros(0, device=self.device), 0
        if kind == "model":
            held: Tensor = main.data
        else:
            state = self._optimizer_of(parameter).state.get(main, {}).get(kind)
            held = torch.zeros_like(main) if state is None else state
        return self.optimizer_buffers.readable(self.weights_buffers.readable(held)).view(-1), first

    def _main(self, parameter: torch.nn.Parameter) -> tuple[Tensor | None, int]:
        """Returns the weights that the optimizer changes, or this rank's shard of them or None, and their offset."""
        if not self.trainable:
            return parameter, 0
        if not self._is_sharded:
            return getattr(parameter, "main_param", parameter), 0
        stepper = self._stepper_of(parameter)
        if parameter not in stepper.model_param_group_index_map:
            return None, 0
        group, number = stepper.model_param_group_index_map[parameter]
        shard = stepper.optimizer.param_groups[group]["params"][number]
        return shard, stepper._get_model_param_range_map(parameter)["param"].start

    def _stepper_of(self, parameter: torch.nn.Parameter) -> MegatronOptimizer:
        """Returns Megatron's optimizer of a parameter: experts have the second one, if there are two."""
        return self.stepper.chained_optimizers[-1 if _is_of_expert(parameter) else 0]

    def _optimizer_of(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self._stepper_of(parameter).optimizer
        return optimizer

    def get(self, kind: str, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = self.shape(name)
        whole = torch.zeros(torch.Size(shape).numel(), dtype=dtype, device=self.device)
        for part in self.parts(kind, name):
            runs, length = part.values.shape
            values = part.values.to(self.device).to(dtype)
            if runs == 1:
                whole[int(part.starts[0]) : int(part.starts[0]) + length] = values[0]
            else:
                positions = part.starts[:, None] + torch.arange(length)
                whole[positions.to(self.device)] = values
        # summed as bits, which are 0 on all ranks but one: a sum of numbers would lose the sign of a zero
        ranks.summed(whole.view(torch.uint8))
        return whole.view(shape)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.parameters[name].shape)

    def load_state(self, stored: StoredState) -> None:
        self.groups.enter()
        super().load_state(stored)

    def _load(self, kind: str, name: str, stored: RangeReader) -> None:
        if kind == "model":
            self._fill(self.parameters[name], stored)
            return
        self._make_state()
        self._fill_held(kind, name, stored)

    def _fill(self, parameter: torch.nn.Parameter, stored: RangeReader) -> None:
        name = self._names[parameter]
        for local, block in self._places[name]:
            for _, part in parts_between(local.data.view(-1), 0, [block]):
                part.fill(stored)
        if self.trainable:
            self._fill_held("model", name, stored)

    def _fill_held(self, kind: str, name: str, stored: RangeReader) -> None:
        for local, block in self._places[name]:
            values, first = self._held(kind, local)
            for _, part in parts_between(values, first, [block]):
                part.fill(stored)

    def _make_state(self) -> None:
        """Creates the optimizer state, which Megatron does in its first step."""
        for part in self.stepper.chained_optimizers:
            for group in part.optimizer.param_groups:
                if not isinstance(part.optimizer, torch.optim.Optimizer) or "step" in group:
                    group["step"] = self.steps  # the fused optimizers of TransformerEngine and Apex keep it here
                for main in group["params"]:
                    state = part.optimizer.state[main]
                    for kind in self.optimizer_type.state:
                        if kind not in state:
                            state[kind] = torch.zeros_like(main)
                    if isinstance(part.optimizer, torch.optim.AdamW):
                        state["step"] = torch.tensor(float(self.steps))

    def _reset_optimizer(self) -> None:
        if self.trainable:
            self._free_gradients()
            for part in self.stepper.chained_optimizers:
                part.optimizer.state.clear()

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        # with float32 the optimizer's weights are the model's own
        if self.trainable and self.dtype == "bfloat16":
            for parameter in self.decoder.parameters():
                main, _ = self._main(parameter)
                if main is not None:
                    yield main.data
        for part in self.stepper.chained_optimizers if self.trainable else ():
            for state in part.optimizer.state.values():
                yield from state.values()


def _is_of_expert(parameter: torch.nn.Parameter) -> bool:
    """Returns True if Megatron marks a parameter as an expert's."""
    return not getattr(parameter, "allreduce", True)


def _no_loss(_: Tensor) -> None:
    raise AssertionError("only the last stage has a loss")
