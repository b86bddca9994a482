"""The base of all train engines: computes outputs and gradients of a batch, and saves and loads the state.

An engine defines where tensors are stored, how a loss is backpropagated and how a step is taken. Everything here is
SPMD: each rank gets the whole batch, computes its share, and returns the whole result.
"""

from __future__ import annotations

import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import torch

from ratchet.rlhf.algorithms.masked import LossNormalizers
from ratchet.rlhf.algorithms.optimizers import AdamW, Optimizer
from ratchet.rlhf.batch import TrajectoryBatch, ragged
from ratchet.rlhf.distributed import accelerator, ranks
from ratchet.rlhf.distributed.host_buffers import HostBuffers, release_memory
from ratchet.rlhf.errors import NotFinite
from ratchet.rlhf.models import activation_checkpointing, lora, prefix_sharing
from ratchet.rlhf.models.activation_checkpointing import Checkpointing
from ratchet.rlhf.models.hf_configs import config_json
from ratchet.rlhf.models.hub_layout import copy_weights, hub_layout, split
from ratchet.rlhf.models.router_loss import NAME as ROUTER_LOSS
from ratchet.rlhf.models.sequence_parallel import Team
from ratchet.rlhf.models.skeleton import Skeleton
from ratchet.rlhf.models.token_outputs import TOP_K, Head, TokenOutputs
from ratchet.rlhf.schema import ROUTES
from ratchet.rlhf.train.engine import InferenceEngine, InferencePlan, OptimizerPlan
from ratchet.rlhf.train.micro_batches import (
    TOP_K_COLUMNS,
    Layout,
    MicroBatch,
    Piece,
    by_prompt,
    by_token_budget,
    check_routes,
    deal,
    in_rounds,
    prompt_numbers,
)
from ratchet.rlhf.train.performance import TrainingFlops
from ratchet.rlhf.weights import state_digest
from ratchet.rlhf.weights.stored_state import Held, RangeReader, StoredState, StoredTensor, TensorFile
from ratchet.rlhf.weights.tensor_shards import TensorShard

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ratchet.rlhf.algorithms.objectives import Objective
    from ratchet.rlhf.config.sections import Dtype, Kernels
    from ratchet.rlhf.models.vision import Vision

LossOf = Callable[[int, MicroBatch, "dict[str, Tensor]"], "Tensor"]
"""Computes the loss of a micro-batch on the device from its number and outputs."""
WORTH_SHARING = 0.95
"""Prompts are shared if that shrinks micro-batches to at most this share of their padded size."""
KEYS_PER_TOKEN = 8
"""Tokens whose keys and values in attention take about as much memory as one token in all layers."""


class ModelEngine(InferenceEngine, ABC):
    """A model with its optimizer.

    The optimizer's weights and state, which are saved, are float32. With bfloat16 the model computes with rounded
    weights; a model that is not trained has no others.
    """

    outputs_type: ClassVar[type[TokenOutputs]] = TokenOutputs
    """The module that computes outputs from the model."""

    def __init__(
        self,
        model: PreTrainedModel | Skeleton,
        head: Head,
        *,
        dtype: Dtype = "float32",
        trainable: bool = True,
        gradient_checkpointing: Checkpointing | None = False,
        kernels: Kernels = "torch",
        packing: bool | None = None,
        share_prompts: bool = True,
        sequence_parallel: int = 1,
        tensor_parallel: int = 1,
        follows_routes: bool = False,
        vision: Callable[[PreTrainedModel], Vision] | None = None,
        optimizer: Optimizer = AdamW(),  # noqa: B008  (it is frozen)
    ) -> None:
        """Wraps a model.

        Args:
            model: the model with float32 weights, or its skeleton, of which each rank reads its share.
            head: outputs of the model: `policy` (log-probs and entropy), `value` (values) or `reward` (scores).
            gradient_checkpointing: recompute all activations in the backward pass, or a selection, to save memory;
                None: a selection on a GPU.
            kernels: implementation of the layers; see `ratchet.rlhf.models.kernels`.
            packing: pack sequences instead of padding them; None: where attention has a kernel for it (in bfloat16 on a
                GPU).
            share_prompts: compute a prompt once for all its responses in a micro-batch, where the model supports it.
            sequence_parallel: number of adjacent ranks that split each sequence.
            tensor_parallel: number of adjacent ranks that split each matrix.
            follows_routes: where a batch has the experts that tokens went to, they go to these again.
            vision: how the model sees the images of a batch; None: it reads text only.

        Raises:
            UserError: the model does not support `packing`, `sequence_parallel` or routes, or its log-probs would be
                wrong.
        """
        skeleton = Skeleton.of(model)
        model, self._sources = skeleton.model, skeleton.sources
        if not lora.has(model):  # adapters freeze all of the model
            skeleton.frozen_as_buffers()
        skeleton.read_buffers()
        self.layout = hub_layout(model)
        """Checkpoint tensors by parameter or buffer; see `hub_layout`."""
        team = Team.of(sequence_parallel) if sequence_parallel > 1 else None
        varlen = prefix_sharing.has_kernel(model, accelerator.device(), getattr(torch, dtype))
        self.module = self.outputs_type(
            model,
            head,
            team=team,
            packing=bool(packing),
            share_prompts=share_prompts,
            varlen=varlen,
            follows_routes=follows_routes,
        )
        self.module.use(kernels)
        self.vision = None if vision is None else vision(model)
        self.model = model
        """The model inside `module`; engines that shard it hold parts of its tensors."""
        self.head, self.dtype, self.trainable = head, dtype, trainable
        self.packing = self.module.varlen if packing is None else packing
        sharing = sequence_parallel * tensor_parallel
        self.share = ranks.Share.of(sharing)
        self.counts = ranks.rank() % sharing == 0
        """True if this rank contributes results: one rank does, of those that compute the same part."""
        self.device = accelerator.device()
        self.weights_buffers, self.optimizer_buffers = HostBuffers(self.device), HostBuffers(self.device)
        self.optimizer_type = type(optimizer)
        self.steps = 0
        """Optimizer steps taken so far."""
        kept = activation_checkpointing.chosen(gradient_checkpointing, self.device) if trainable else False
        model.train(bool(kept))  # only affects checkpointing: the models have no dropout
        if kept:
            activation_checkpointing.enable(model, kept)
        if not trainable:
            model.requires_grad_(False)
        self._flops = TrainingFlops.of(model)
        self.is_cast = not trainable and model.dtype == torch.bfloat16
        """True if the weights have the type of the computation."""

    # Defined by each engine.

    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer | None

    @abstractmethod
    def _backward(self, loss: Tensor, last: bool) -> None:
        """Adds the gradients of this rank's loss to those of the mini-batch, summed over ranks, not averaged.

        `last` marks the last micro-batch of the mini-batch.
        """

    @abstractmethod
    def _step(self, plan: OptimizerPlan) -> float:
        """Clips the gradients, takes the step and clears the gradients; returns the gradient norm before clipping.

        Raises NotFinite if the norm is not finite; the state must then be loaded again.
        """

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """Returns the trainable parameters by name (only adapters, if there are any); all if the model is not trained.

        Called after the engine has sharded the module, which may replace its parameters.
        """
        named = self.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad or not self.trainable}

    def _read(self) -> None:
        """Reads the weights of a skeleton, after the engine has sharded the module and given it memory."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in self._sources:
                    self._fill(parameter, self._sources[name])
        self._sources = {}

    @abstractmethod
    def _fill(self, parameter: torch.nn.Parameter, stored: RangeReader) -> None:
        """Reads this rank's share of a parameter."""

    def names(self) -> list[str]:
        """Returns the sorted names of `parameters`, which are the same on every rank."""
        return sorted(self.parameters)

    @abstractmethod
    def get(self, kind: str, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Gathers a parameter or its optimizer state; all ranks must make the same call.

        Args:
            kind: `model`, or the name of an optimizer state (`Optimizer.state`).
            dtype: type in which ranks exchange their parts.

        Returns:
            The whole tensor, of type `dtype`, on the device, or in host memory if it is there.
        """

    @abstractmethod
    def parts(self, kind: str, name: str) -> Iterator[TensorShard]:
        """Yields this rank's share of a parameter, or of its optimizer state; no element is yielded by two ranks.

        `kind` is `model`, or the name of an optimizer state (`Optimizer.state`).
        """

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a whole parameter."""

    @abstractmethod
    def _load(self, kind: str, name: str, stored: RangeReader) -> None:
        """Replaces a parameter or its optimizer state by a whole float32 tensor; all ranks must make the same call."""

    @abstractmethod
    def _reset_optimizer(self) -> None:
        """Clears the optimizer state, and gradients left by an aborted update."""

    def _call(self, *inputs: Any) -> dict[str, Tensor]:
        return self.module(*inputs)  # type: ignore[no-any-return]

    def place(self, *, model: bool, optimizer: bool) -> None:
        """Moves state to the device, or to host memory to make room for a model of this or another process.

        Computing and loading require the weights on the device, and training all state. The state can be read
        (`weights`, `digest`, `state`) where it is.
        """
        if model:
            self.weights_buffers.give_back()
        if optimizer:
            self.optimizer_buffers.give_back()
        has_freed = False
        if not optimizer:
            for parameter in self.parameters.values():
                parameter.grad = None  # an update that failed may have left it
            has_freed |= self.optimizer_buffers.take(self._optimizer_tensors())
        if not model:
            self._free_copies()
            has_freed |= self.weights_buffers.take((*self.module.parameters(), *self.module.buffers()))
        if has_freed:
            release_memory(self.device)

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """Yields the tensors of the optimizer, except the parameters of the model."""
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            yield from state.values()

    def _free_copies(self) -> None:
        """Frees device memory that can be computed again from the weights."""

    # Computing.

    def infer_each(self, batches: Sequence[TrajectoryBatch], plan: InferencePlan) -> list[dict[str, pa.Array]]:
        batches = [self._with_routes(batch) for batch in batches]
        names = plan.outputs
        lengths = [batch.lengths("response_ids") for batch in batches]
        starts = [np.concatenate([[0], np.cumsum(of_batch)]) for of_batch in lengths]
        widths = {name: plan.top_k if name in TOP_K else 1 for name in names}
        flat = [
            {name: np.zeros((of_batch[-1], width), dtype=np.float32) for name, width in widths.items()}
            for of_batch in starts
        ]
        # rounding depends on the rows of a micro-batch, so none mixes two batches; they are only dealt together
        micro_batches = self._dealt(batches, plan.micro_batch_tokens)
        # all outputs leave a GPU together, so that it never waits for the host in between
        parts = self._outputs([replace(micro, top=plan.top_k) for *_, micro in micro_batches], names, plan.temperature)
        with self._routes_end():
            computed = [outputs for _, outputs in parts]
        columns = {name: [outputs[name] for outputs in computed] for name in names}
        on_host = {
            name: torch.cat(values).view(-1, widths[name]).cpu().numpy() for name, values in columns.items() if values
        }
        begins = np.cumsum([0, *(len(micro.targets) for *_, micro in micro_batches)])
        for (number, rows, _), first in zip(micro_batches, begins, strict=False):
            begin, end = starts[number][:-1], starts[number][1:]
            where = np.concatenate([np.arange(begin[row], end[row]) for row in rows] or [np.arange(0)])
            for name in names:
                flat[number][name][where] = on_host[name][first : first + len(where)] if self.counts else 0
        return [
            {name: ragged(self._from_all(values).ravel(), widths[name] * of_batch) for name, values in by_name.items()}
            for by_name, of_batch in zip(flat, lengths, strict=True)
        ]

    def update(self, batch: TrajectoryBatch, objective: Objective, plan: OptimizerPlan) -> dict[str, float]:
        assert self.trainable, "a reference is never updated"
        assert not self.optimizer_buffers.in_use, "the optimizer state is not on the device"
        if not plan.mini_batches:
            return {}
        batch = self._with_routes(batch)
        sums: dict[str, float] = {}
        with self._routes_end():
            for rows in plan.mini_batches:
                for name, value in self._mini_batch(batch.take(rows), objective, plan).items():
                    sums[name] = sums.get(name, 0.0) + value
        return {name: value / len(plan.mini_batches) for name, value in sums.items()}

    def _with_routes(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """Returns the batch without its column of routes if that is empty. Raises UserError if routes do not fit."""
        if not batch.has_values(ROUTES):
            return batch.without(ROUTES) if ROUTES in batch else batch
        routers = self.module.routers
        assert routers is not None, "only an engine that follows routes is given any"
        check_routes(batch, routers.count, routers.experts)
        return batch

    @contextmanager
    def _routes_end(self) -> Iterator[None]:
        """Lets the routers choose again after the block: a rollout may share the model."""
        try:
            yield
        finally:
            if self.module.routers is not None:
                self.module.routers.end()

    def update_flops(self, batch: TrajectoryBatch, plan: OptimizerPlan) -> float:
        rows = np.array([row for mini_batch in plan.mini_batches for row in mini_batch], dtype=np.int64)
        return self._flops(batch.lengths("prompt_ids")[rows], batch.lengths("response_ids")[rows])

    def _mini_batch(self, mini_batch: TrajectoryBatch, objective: Objective, plan: OptimizerPlan) -> dict[str, float]:
        """Takes one optimizer step with the gradient of the whole mini-batch; returns the metrics by name."""
        normalizers = LossNormalizers.of(mini_batch.padded("loss_mask"))
        micro_batches = list(self._micro_batches(mini_batch, plan.micro_batch_tokens, objective.together))
        padded = {name: mini_batch.padded(name).float() for name in objective.columns}
        # several values for each token
        padded |= {
            name: padded[name].view(len(mini_batch), normalizers.horizon, -1) for name in TOP_K_COLUMNS & padded.keys()
        }
        columns = {name: accelerator.placed(values, self.device) for name, values in padded.items()}
        # a selection compares all tokens of the mini-batch, so it needs their outputs first
        if objective.selection is not None:
            shape = len(mini_batch), normalizers.horizon
            whole = self._whole(micro_batches, objective, plan, shape)
            columns["selected"] = objective.selection(whole, columns)
        router = self.module.router_loss
        tokens = int((mini_batch.lengths("prompt_ids") + np.maximum(mini_batch.lengths("response_ids") - 1, 0)).sum())
        sums: dict[str, Tensor] = {}

        def loss_of(number: int, micro: MicroBatch, outputs: dict[str, Tensor]) -> Tensor:
            rows, _ = micro_batches[number]
            part = {name: column.index_select(0, micro.rows)[:, : micro.horizon] for name, column in columns.items()}
            balance = outputs.pop(ROUTER_LOSS, None)
            loss, metrics = objective(
                {name: micro.padded(values) for name, values in outputs.items()}, part, normalizers
            )
            if router is not None and balance is not None:
                # weighted by the micro-batch's share of the tokens, because it is a mean over tokens
                balance = balance * (micro.tokens / tokens)
                loss = loss + router.coefficient * balance
                metrics = {**metrics, f"{objective.prefix}/{ROUTER_LOSS}": balance}
            for name, value in metrics.items():
                sums.setdefault(name, torch.zeros((), device=self.device)).add_(
                    # only one of the ranks that compute the same part reports it
                    value.detach() if len(rows) and self.counts else 0
                )
            # a repeated micro-batch keeps this rank in step, but contributes nothing
            return loss if len(rows) else 0 * loss

        self._accumulate(
            [micro for _, micro in micro_batches],
            objective.outputs,
            plan.temperature,
            loss_of,
            with_router=router is not None,
        )
        norm = self._step(plan)
        self.steps += 1
        return self._summed(sums) | {f"{objective.prefix}/grad_norm": norm}

    def _accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        names: tuple[str, ...],
        temperature: float,
        loss_of: LossOf,
        *,
        with_router: bool,
    ) -> None:
        """Computes the gradient of a mini-batch from this rank's micro-batches and their losses.

        `names` are the outputs that the loss reads; `with_router` adds the router's auxiliary loss.
        """
        for number, micro in enumerate(micro_batches):
            here = micro.to(self.device)
            outputs = self._forward(here, names, temperature, with_router=with_router)
            self._backward(loss_of(number, here, outputs), last=number == len(micro_batches) - 1)

    def _outputs(
        self, micro_batches: Sequence[MicroBatch], names: tuple[str, ...], temperature: float
    ) -> Iterator[tuple[MicroBatch, dict[str, Tensor]]]:
        """Yields micro-batches on the device, and their outputs without gradients."""
        for micro in micro_batches:
            here = micro.to(self.device)
            with torch.no_grad():
                yield here, self._forward(here, names, temperature)

    def _summed(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Sums metrics over the ranks."""
        return dict(zip(sums, ranks.summed(torch.stack(list(sums.values()))).tolist(), strict=True)) if sums else {}

    def _whole(
        self,
        micro_batches: list[tuple[np.ndarray, MicroBatch]],
        objective: Objective,
        plan: OptimizerPlan,
        shape: tuple[int, int],
    ) -> dict[str, Tensor]:
        """Computes the model's outputs for the whole mini-batch, without gradients, shape (batch, response)."""
        names = tuple(name for name in objective.outputs if name not in TOP_K)  # no selection compares these
        whole = {name: torch.zeros(shape, device=self.device) for name in names}
        computed = self._outputs([replace(micro, top=0) for _, micro in micro_batches], names, plan.temperature)
        for (rows, _), (micro, outputs) in zip(micro_batches, computed, strict=True):
            for name, values in outputs.items():
                padded = micro.padded(values)[: len(rows)] if self.counts else 0
                whole[name][micro.rows[: len(rows)], : micro.horizon] = padded
        return {name: ranks.summed(values) for name, values in whole.items()}

    def _dealt(self, batches: Sequence[TrajectoryBatch], budget: int) -> list[tuple[int, np.ndarray, MicroBatch]]:
        """Splits batches into micro-batches, and deals these to the ranks.

        Returns:
            Batch number, rows and micro-batch of each of this rank's.
        """
        split = [self._split(batch, budget) for batch in batches]
        pieces = [
            (number, piece)
            for number, (_, by_team) in enumerate(split)
            for piece in chain.from_iterable(by_team)
            if len(piece.rows)
        ]
        by_team = in_rounds(np.array([piece.size for _, piece in pieces], dtype=np.int64), self.share.shares)
        own = [(pieces[index], True) for index in by_team[self.share.number]]
        if len(own) < len(by_team[0]):
            # repeats a piece to stay in step with the other ranks; its result is discarded
            own.append((pieces[by_team[0][-1]], False))
        return [
            (
                number,
                piece.rows if counts else piece.rows[:0],
                self._micro_batch(batches[number], piece, split[number][0]),
            )
            for (number, piece), counts in own
        ]

    def _micro_batches(
        self, batch: TrajectoryBatch, budget: int, together: int = 1
    ) -> Iterator[tuple[np.ndarray, MicroBatch]]:
        """Splits this rank's share of a batch into micro-batches; yields their rows and the micro-batches.

        `together` consecutive rows stay in the same micro-batch.
        """
        layout, by_team = self._split(batch, budget, together)
        pieces = [piece for piece in chain.from_iterable(by_team) if len(piece.rows)]
        for piece in by_team[self.share.number]:
            # a piece without rows repeats another, to stay in step with the other ranks; its result is discarded
            computed = piece if len(piece.rows) else min(pieces, key=lambda piece: piece.size)
            yield piece.rows, self._micro_batch(batch, computed, layout)

    def _micro_batch(self, batch: TrajectoryBatch, piece: Piece, layout: Layout) -> MicroBatch:
        module = self.module
        return MicroBatch.of(batch, piece.rows, layout, varlen=module.varlen, team=module.team, vision=self.vision)

    def _split(self, batch: TrajectoryBatch, budget: int, together: int = 1) -> tuple[Layout, list[list[Piece]]]:
        """Chooses the layout of a batch's micro-batches, and their rows by team; the same on every rank."""
        prompts, responses = batch.lengths("prompt_ids"), np.maximum(batch.lengths("response_ids") - 1, 0)
        lengths = (prompts + responses).reshape(-1, together)
        layout: Layout = "packed" if self.packing else "padded"
        sizes = lengths.sum(1) if self.packing else together * lengths.max(1)
        groups = list(np.arange(len(batch)).reshape(-1, together))
        if self.module.shares_prompts and together == 1:
            prompt_of = prompt_numbers(batch)
            read = responses + prompts // KEYS_PER_TOKEN  # attention copies a prompt's keys for each response
            shared = by_prompt(prompt_of, prompts, read, budget, self.share.shares)
            padded = sum(len(rows) * sizes[rows].max() for rows in by_token_budget(sizes, budget))
            repeats = len(np.unique(prompt_of)) < len(batch)
            if self.module.varlen:  # packing needs no shared prompts there
                is_shared = repeats and shared[1].sum() <= WORTH_SHARING * (sizes.sum() if self.packing else padded)
            else:
                # on a GPU, whole sequences without padding would need a mask, and so a slower kernel
                may_share = repeats or self.packing or self.device.type == "cpu"
                is_shared = may_share and (self.packing or shared[1].sum() <= WORTH_SHARING * padded)
            if is_shared:
                layout, (groups, sizes) = "shared", shared
        is_packed = layout != "padded"

        def piece(chosen: np.ndarray) -> Piece:
            rows = np.concatenate([groups[number] for number in chosen] or [np.arange(0)])
            size = sizes[chosen].sum() if is_packed else len(chosen) * sizes[chosen].max(initial=0)
            return Piece(rows, int(size))

        by_team = deal(sizes, budget, self.share.shares, packed=is_packed)
        return layout, [[piece(chosen) for chosen in pieces] for pieces in by_team]

    def _forward(
        self, micro: MicroBatch, outputs: Iterable[str], temperature: float, *, with_router: bool = False
    ) -> dict[str, Tensor]:
        """Computes outputs by name of a micro-batch on the device, shape (response tokens of the micro-batch,).

        Those in `TOP_K` have k values for each token. `with_router` adds the scalar `router_aux_loss`.
        """
        assert not self.weights_buffers.in_use, "the weights are not on the device"
        copies = micro.copies if with_router else None
        ids, positions, shared = micro.input_ids, micro.position_ids, micro.shared
        targets, names = (micro.at, micro.targets), tuple(outputs)
        places = micro.own, micro.top, micro.routes, micro.images
        return self._call(ids, positions, *targets, temperature, names, shared, copies, *places)

    def _from_all(self, values: np.ndarray) -> np.ndarray:
        """Combines the values of all ranks, each of which has filled in its own rows and left the others 0."""
        if ranks.count() == 1:
            return values
        return ranks.summed(torch.from_numpy(values).to(self.device)).cpu().numpy()

    @property
    def output_layer(self) -> torch.nn.Module:
        """The module that computes logits."""
        return self.model.get_output_embeddings()  # type: ignore[no-any-return]

    # State as whole, logical tensors, whatever the layout. Each tensor has an owner rank, which writes it.

    def digest(self) -> str:
        tensors = [(kind, name) for kind in self._kinds() for name in self.names()]
        parts = {f"{kind}.{name}": self.parts(kind, name) for kind, name in tensors}
        shapes = {f"{kind}.{name}": self.shape(name) for kind, name in tensors}
        buffers = {name: _sha256(buffer) for name, buffer in self._buffers().items()}
        return state_digest.of_parts(parts, shapes, json.dumps([self.steps, buffers], sort_keys=True))

    def state(self, *, optimizer: bool = True) -> dict[str, bytes]:
        """Returns this rank's files by name: its share of the tensors, in the layout that `from_pretrained` reads.

        Adapters are written in PEFT's layout, which allows a single file: rank 0 writes it.

        Args:
            optimizer: include the optimizer's state, without which training cannot continue from the files.
        """
        adapted, count = lora.has(self.model), ranks.count()
        part = "" if count == 1 else f"-{ranks.rank() + 1:05d}-of-{count:05d}"
        weights_file = "adapter_model.safetensors" if adapted else f"model{part}.safetensors"
        owners = {tensor: owner for tensor, owner in self._owners().items() if optimizer or tensor[0] == "model"}
        own = [tensor for tensor, owner in owners.items() if owner == ranks.rank()]
        own_buffers = self._buffers() if ranks.rank() == 0 else {}
        types = {name: torch.float32 for kind, name in own if kind == "model"}
        types |= {name: buffer.dtype for name, buffer in own_buffers.items()}
        shapes = {tensor.name: (dtype, tensor.shape) for name, dtype in types.items() for tensor in self.layout[name]}
        weights = TensorFile(shapes)
        moments = TensorFile(
            {f"{kind}.{name}": (torch.float32, self.shape(name)) for kind, name in own if kind != "model"}
        )
        for (kind, name), owner in owners.items():
            # gathering is collective: every rank takes part
            whole = self.get(kind, name)
            if owner == ranks.rank():
                (weights if kind == "model" else moments).write(whole)
            del whole  # before the next one is gathered
        for buffer in own_buffers.values():
            weights.write(buffer)
        files = {f"optimizer{part}.safetensors": moments.content()} if optimizer else {}
        if shapes or not adapted:
            files[weights_file] = weights.content()
        files_of = ranks.gathered(dict.fromkeys(shapes, weights_file))
        if ranks.rank() == 0:
            name = "adapter_config.json" if adapted else "config.json"
            files[name] = lora.config_json(self.model) if adapted else config_json(self.model)
            files["state.json"] = json.dumps({"format": 2, "head": self.head, "steps": self.steps}).encode()
            if count > 1 and not adapted:
                index = {"metadata": {}, "weight_map": {name: file for part in files_of for name, file in part.items()}}
                files["model.safetensors.index.json"] = json.dumps(index, indent=1).encode()
        return files

    def load_state(self, stored: StoredState) -> None:
        """Loads the state, of which each rank reads its share, from the files of any number of ranks."""
        names, buffers = self.names(), self._buffers()
        weights = self._stored(stored)
        state = stored.file("state.json")
        assert state is not None
        assert not self.weights_buffers.in_use, "the weights are not on the device"
        assert not self.optimizer_buffers.in_use, "the optimizer state is not on the device"
        self._reset_optimizer()
        with torch.no_grad():
            for name in names:
                self._load("model", name, weights[name])
            for name, buffer in buffers.items():
                buffer.copy_(weights[name].whole())
            self.steps = json.loads(state)["steps"]
            # before the first step there is no optimizer state
            if self.steps:
                moments = stored.moments
                for kind in self.optimizer_type.state:
                    for name in names:
                        self._load(kind, name, moments[f"{kind}.{name}"])

    def follow(self, other: ModelEngine, share: float) -> None:
        """Moves the weights a share of the way to another engine's: w + share (other - w), computed in float32.

        The other engine holds the same model on the same ranks; all of them must make the same call. Share 1 copies the
        weights.
        """
        assert not self.trainable, "an optimizer would not know"
        assert not self.weights_buffers.in_use, "the weights are not on the device"
        buffers = other._buffers()
        with torch.no_grad():
            for name in self.names():  # only one tensor at a time is gathered
                weights = other.get("model", name)
                if share < 1:
                    own = self.get("model", name)
                    weights = own.lerp(weights.to(own.device), share)
                self._load("model", name, Held(weights))
            for name, buffer in self._buffers().items():
                buffer.copy_(buffers[name])

    def _stored(self, stored: StoredState) -> dict[str, StoredTensor]:
        """Returns the stored parameters and buffers, by their names in the model."""
        shapes = {name: self.shape(name) for name in self.names()}
        shapes |= {name: tuple(buffer.shape) for name, buffer in self._buffers().items()}
        unread, weights = dict(stored.weights), {}
        for name, shape in shapes.items():
            keys = [tensor.name for tensor in self.layout[name]]
            assert unread.keys() >= set(keys), f"not a checkpoint of this model: it lacks {keys[0]}"
            weights[name] = StoredTensor.joined([unread.pop(key) for key in keys], shape)
        assert not unread, f"not a checkpoint of this model: it has {', '.join(unread)}"
        return weights

    def weights(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Yields the model's tensors under their names in a checkpoint, whole, on every rank; all ranks must iterate.

        `dtype` is that of the parameters; buffers keep theirs.
        """
        for name in self.names():
            yield from split(self.get("model", name, dtype).detach(), self.layout[name])
        for name, buffer in self._buffers().items():
            yield from split(buffer, self.layout[name])

    @property
    def adapter_config(self) -> bytes | None:
        """PEFT's config as JSON; None without adapters."""
        return lora.config_json(self.model) if lora.has(self.model) else None

    def _owners(self) -> dict[tuple[str, str], int]:
        """Returns the rank that writes each tensor, by kind and name; all ranks write about equally many elements."""
        written = [0] * ranks.count()
        owners: dict[tuple[str, str], int] = {}
        sizes = {name: torch.Size(self.shape(name)).numel() for name in self.names()}
        for kind in self._kinds():
            for name in sorted(sizes, key=lambda name: -sizes[name]):
                # PEFT's layout has a single file
                owner = 0 if kind == "model" and lora.has(self.model) else written.index(min(written))
                written[owner] += sizes[name]
                owners[kind, name] = owner
        return owners

    def _kinds(self) -> tuple[str, ...]:
        """Returns the kinds of tensors in the state."""
        return ("model", *(self.optimizer_type.state if self.trainable and self.steps else ()))

    def _buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that a checkpoint contains (not derived ones, such as rotary frequencies)."""
        if lora.has(self.model):
            return {}
        names = self.model.state_dict().keys() - set(self.names())
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in names}
        return {name: self.weights_buffers.readable(buffer) for name, buffer in buffers.items()}


class WithoutAdapters(InferenceEngine):
    """The reference of a LoRA actor: the actor with its adapters off, which takes no extra memory."""

    def __init__(self, actor: ModelEngine) -> None:
        """Wraps an actor that has adapters."""
        self.actor = actor

    def infer_each(self, batches: Sequence[TrajectoryBatch], plan: InferencePlan) -> list[dict[str, pa.Array]]:
        """Computes per-token outputs of the base model; see `InferenceEngine.infer_each`."""
        with lora.off(self.actor.model):
            return self.actor.infer_each(batches, plan)


def float32_model(engine: ModelEngine) -> PreTrainedModel:
    """Copies the model of an engine that does not shard it, with the float32 weights that the optimizer keeps."""
    model = copy.deepcopy(engine.model).float()
    copy_weights(engine.weights(), model)
    return model


def _sha256(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data.data).hexdigest()}"


def not_finite(norm: float) -> NotFinite:
    """Builds the error for a gradient norm that is not finite."""
    return NotFinite(f"the gradient's norm is {norm}; nothing of this update is committed")
