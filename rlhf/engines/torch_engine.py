"""`engine: torch`: one process, CPU or GPU, plain PyTorch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from rlhf.algorithms.masked import Totals
from rlhf.batch import TrajectoryBatch, ragged
from rlhf.engines.base import Schedule
from rlhf.engines.micro_batches import MicroBatch, by_token_budget
from rlhf.errors import NotFinite
from rlhf.models import config_json

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from transformers import PreTrainedModel

    from rlhf.algorithms.objectives import Objective


class TorchEngine:
    """A model with its optimizer. Weights and optimizer state are float32; bfloat16 is the type of the computation.

    `head` says what the model gives: a policy's log-probs and entropy, or a critic's values.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: Literal["policy", "value"],
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        trainable: bool = True,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.head = head
        self.dtype = dtype
        self.model.train(trainable and gradient_checkpointing)  # dropout is off either way
        if trainable and gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.requires_grad_(trainable)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.parameters.values(), fused=True) if trainable else None

    def infer(
        self, batch: TrajectoryBatch, outputs: Iterable[str], *, temperature: float, micro_batch_tokens: int
    ) -> dict[str, pa.Array]:
        wanted = tuple(outputs)
        lengths = batch.lengths("response_ids")
        starts = np.concatenate([[0], np.cumsum(lengths)])
        flat = {name: np.empty(starts[-1], dtype=np.float32) for name in wanted}
        for rows in by_token_budget(batch.lengths("prompt_ids") + lengths, micro_batch_tokens):
            micro = MicroBatch.of(batch, rows)
            with torch.no_grad():
                found = self._forward(micro, wanted, temperature)
            for name in wanted:
                padded = found[name].float().cpu().numpy()
                for row, values in zip(rows, padded, strict=True):
                    flat[name][starts[row] : starts[row + 1]] = values[: lengths[row]]
        return {name: ragged(values, lengths) for name, values in flat.items()}

    def update(self, batch: TrajectoryBatch, objective: Objective, schedule: Schedule) -> dict[str, float]:
        assert self.optimizer is not None, "a reference is never updated"
        for group in self.optimizer.param_groups:
            group["lr"], group["betas"], group["weight_decay"] = schedule.lr, schedule.betas, schedule.weight_decay
        sums: dict[str, float] = {}
        for rows in schedule.mini_batches:
            for name, value in self._step(batch.take(rows), objective, schedule).items():
                sums[name] = sums.get(name, 0.0) + value
        return {name: value / len(schedule.mini_batches) for name, value in sums.items()}

    def _step(self, mini_batch: TrajectoryBatch, objective: Objective, schedule: Schedule) -> dict[str, float]:
        """One optimizer step; the gradient is that of the whole mini-batch, however it is cut."""
        assert self.optimizer is not None
        totals = Totals.of(mini_batch.padded("loss_mask"))
        lengths = mini_batch.lengths("prompt_ids") + mini_batch.lengths("response_ids")
        pieces = [MicroBatch.of(mini_batch, rows) for rows in by_token_budget(lengths, schedule.micro_batch_tokens)]
        columns = {name: mini_batch.padded(name).float().to(self.device) for name in objective.columns}
        if objective.selection is not None:
            columns["selected"] = objective.selection(self._whole(pieces, objective, schedule, totals), columns)
        sums: dict[str, Tensor] = {}
        for micro in pieces:
            part = {name: column[micro.rows, : micro.at.shape[1]] for name, column in columns.items()}
            loss, metrics = objective(self._forward(micro, objective.outputs, schedule.temperature), part, totals)
            loss.backward()  # type: ignore[no-untyped-call]
            for name, value in metrics.items():
                sums[name] = sums.get(name, torch.zeros((), device=self.device)) + value.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), schedule.grad_clip or math.inf)
        if not torch.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NotFinite(f"the gradient's norm is {norm.item()}; nothing of this update is committed")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        prefix = "critic" if self.head == "value" else "actor"
        return {name: value.item() for name, value in sums.items()} | {f"{prefix}/grad_norm": norm.item()}

    def _whole(
        self, pieces: list[MicroBatch], objective: Objective, schedule: Schedule, totals: Totals
    ) -> dict[str, Tensor]:
        """The model's outputs for a whole mini-batch, without gradient."""
        shape = (sum(len(micro.rows) for micro in pieces), totals.horizon)
        found = {name: torch.zeros(shape, device=self.device) for name in objective.outputs}
        for micro in pieces:
            with torch.no_grad():
                part = self._forward(micro, objective.outputs, schedule.temperature)
            for name, values in part.items():
                found[name][micro.rows, : values.shape[1]] = values
        return found

    def _forward(self, micro: MicroBatch, outputs: Iterable[str], temperature: float) -> dict[str, Tensor]:
        input_ids = micro.input_ids.to(self.device)
        with self._autocast():
            if self.head == "value":
                values = self.model(input_ids=input_ids, use_cache=False).logits.squeeze(-1)
                return {"values": micro.pick(values[:, micro.first : -1].float())}
            keep = torch.arange(micro.first, input_ids.shape[1] - 1, device=self.device)
            logits = self.model(input_ids=input_ids, use_cache=False, logits_to_keep=keep).logits
        log_probs, entropy = log_probs_and_entropy(
            logits, input_ids[:, micro.first + 1 :], temperature, entropy="entropy" in outputs
        )
        found = {"log_probs": micro.pick(log_probs)}
        if entropy is not None:
            found["entropy"] = micro.pick(entropy)
        return found

    def _autocast(self) -> AbstractContextManager[None]:
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    # State, as logical tensors.

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"model.{name}": parameter.data for name, parameter in self.parameters.items()}
        tensors |= {f"buffer.{name}": buffer for name, buffer in self._buffers().items()}
        return tensors | {f"optimizer.{name}": tensor for name, tensor in self._optimizer_tensors().items()}

    def _buffers(self) -> dict[str, Tensor]:
        """Buffers that a checkpoint holds (not those that the model derives, such as rotary frequencies)."""
        names = self.model.state_dict().keys() - self.parameters.keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in names}

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        if self.optimizer is None:
            return {}
        return {
            f"{kind}.{name}": tensor
            for name, parameter in self.parameters.items()
            for kind, tensor in self.optimizer.state.get(parameter, {}).items()
        }

    def digest(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in sorted(self._tensors().items()):
            digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def state(self) -> dict[str, bytes]:
        model = {name: parameter.data.contiguous() for name, parameter in self.parameters.items()} | self._buffers()
        optimizer = {name: tensor.contiguous() for name, tensor in self._optimizer_tensors().items()}
        return {
            "config.json": config_json(self.model),
            "model.safetensors": save_safetensors(model, metadata={"format": "pt"}),
            "optimizer.safetensors": save_safetensors(optimizer),
            "state.json": json.dumps({"format": 1, "head": self.head}).encode(),
        }

    def load_state(self, files: Mapping[str, bytes]) -> None:
        assert self.optimizer is not None
        targets, model = self.parameters | self._buffers(), load_safetensors(files["model.safetensors"])
        assert model.keys() == targets.keys(), f"not a checkpoint of this model: {model.keys() ^ targets.keys()}"
        with torch.no_grad():
            for name, tensor in model.items():
                targets[name].copy_(tensor)
        self.optimizer.state.clear()
        for name, tensor in load_safetensors(files["optimizer.safetensors"]).items():
            kind, _, parameter = name.partition(".")
            self.optimizer.state[self.parameters[parameter]][kind] = tensor.to(self.device)


def log_probs_and_entropy(
    logits: Float[Tensor, "micro time vocab"], targets: Tensor, temperature: float, *, entropy: bool
) -> tuple[Float[Tensor, "micro time"], Float[Tensor, "micro time"] | None]:
    r""":math:`\log\pi(y) = z_y - lse(z)` and :math:`H = lse(z) - \sum_v \pi_v z_v` of the temperature-scaled
    logits z, in float32; lse is the log of the sum of exponentials."""
    scaled = logits.float() / temperature if temperature != 1.0 else logits.float()
    normalizer = scaled.logsumexp(-1)
    log_probs = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizer
    if not entropy:
        return log_probs, None
    return log_probs, normalizer - ((scaled - normalizer.unsqueeze(-1)).exp() * scaled).sum(-1)
