"""Estimates the memory of a process of a run, phase by phase, and whether vLLM fits beside the models that stay.

What a phase holds beyond the models' state is computed for several moments of it, and the largest counts.
`tests/contract/on_hollow.py` holds the estimates to what engines allocate on a simulated GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from ratchet.rlhf.config.engines import FSDPConfig, TorchConfig
from ratchet.rlhf.config.roles import ROLES
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.decoder_sizes import DecoderSizes
from ratchet.rlhf.models.model_folders import model_folder, parameter_count

if TYPE_CHECKING:
    from ratchet.rlhf.config import ModelConfig, RunConfig
    from ratchet.rlhf.config.engines import TrainEngineConfig, VLLMConfig
    from ratchet.rlhf.models.activation_checkpointing import Checkpointing

GIB = 2**30
ROOM_S = 30.0
"""Seconds that a killed process of another worker or run has to return its memory."""


def resident(config: RunConfig, parameters: Mapping[str, int], ranks: int, *, idle: bool = False) -> dict[str, float]:
    """Estimates what stays on each GPU while the rollout generates, apart from what depends on the batch.

    Args:
        parameters: number of parameters of each model in the same processes, by role.
        ranks: number of those processes.
        idle: count models that leave the GPU when idle, too.

    Returns:
        Bytes by what they hold; empty if all of them give way.
    """
    held: dict[str, float] = {}
    for role, count in parameters.items():
        facts, trainer, model = ROLES[role], config.trainer_of(role), config.model_of(role)
        if trainer.offload_when_idle and not idle:
            continue
        if facts.head == "reward":
            held["weights of the reward model"] = count * _width(model)
        elif not facts.computes:
            held[f"weights of the {role} (host memory)"] = 4 * count
        elif not facts.learns:
            if not facts.shares_actor(config):
                share = trainer.engine.frozen_share(ranks)
                held[f"weights of the {role}"] = share * count * _width(model)
        else:
            learned = 0 if model.lora is not None else count  # adapters do not count
            moments = 4 * len(trainer.optimizer.state) * learned
            held_weights, state = trainer.engine.held(count, learned, moments, _width(model), ranks)
            held |= {f"weights of the {role}": held_weights, f"optimizer state of the {role}": state}
    return {what: size for what, size in held.items() if size}


def gradients(config: RunConfig, parameters: Mapping[str, int], ranks: int) -> dict[str, float]:
    """Estimates the bytes of gradients that each process holds while it trains; adapters', which are small, are left
    out.

    Args:
        parameters: number of parameters of each model in the same processes, by role.
    """
    held: dict[str, float] = {}
    for role, trainer in config.trainers.items():
        if role in parameters and config.model_of(role).lora is None:
            held[f"gradients of the {role}"] = 4 * parameters[role] * trainer.engine.gradient_share(ranks)
    return held


@dataclass(frozen=True)
class Computation:
    """A model as an engine computes it in one process."""

    sizes: DecoderSizes
    engine: TrainEngineConfig
    width: int
    """Bytes of an element in the type of the computation."""
    checkpointing: Checkpointing = "selective"
    fused: bool = False
    """True if norms and activations are fused kernels."""
    compiled: bool = False
    """True if layers are compiled, so that checkpointing recomputes whole ones."""

    @classmethod
    def of(cls, config: RunConfig, role: str, sizes: DecoderSizes) -> Computation:
        """Reads how a role of a run is computed on a GPU."""
        trainer, model = config.trainer_of(role), config.model_of(role)
        chosen = "selective" if trainer.gradient_checkpointing is None else trainer.gradient_checkpointing
        fused, compiled = model.kernels != "torch", model.kernels == "compile"
        return cls(sizes, trainer.engine, _width(model), chosen, fused, compiled)

    def log_probs(self, tokens: int) -> dict[str, float]:
        """Returns the bytes that a micro-batch takes without gradients, by what they hold."""
        sizes, split = self.sizes, self.engine.matrix_split
        tokens //= self.engine.token_split
        stay, ends, layer = self._gathered
        own = 0 if stay > ends else layer
        computed = sizes.forward(self.width, split) * tokens
        return _largest(
            ("gathered weights", "activations"),
            # PyTorch frees a gathered buffer only when the next layer is there
            (stay + ends + own + layer, 0),
            (stay + own + 2 * layer, 0),
            (stay + own + layer, computed),
            (stay, sizes.of_head(tokens, self.width, split, learns=False)),
        )

    def update(self, tokens: int, gradients: float, *, several: bool) -> dict[str, float]:
        """Returns the bytes that a micro-batch takes in an update, with all gradients, by what they hold.

        Args:
            gradients: bytes of all gradients that the process holds at the end.
            several: the mini-batch has several micro-batches, so that the gradients of others are there.
        """
        sizes, engine, width, split = self.sizes, self.engine, self.width, self.engine.matrix_split
        tokens //= engine.token_split
        checkpointing = True if self.compiled and self.checkpointing == "selective" else self.checkpointing
        kept = sizes.kept(width, checkpointing, split) * tokens
        backward = sizes.backward(width, checkpointing, split, fused=self.fused) * tokens
        norm = sizes.of_first_norm(width) * tokens
        all_kept = sizes.layers * kept
        stay, ends, layer = self._gathered
        coming = 2 * layer
        if stay > ends:
            coming = 0  # all weights are there, and all gradients until the last micro-batch
            gradients += 4 * (sizes.layers * sizes.layer + sizes.ends) // split * several
        at_head = (gradients if several else 0, stay, all_kept + sizes.of_head(tokens, width, split, learns=True))
        # the head's gradient waits for that of the embedding, or for all others
        stay += width * sizes.head // split if sizes.is_tied or engine.gathers_layers else 0
        reduced = 4 * sizes.layer // split if engine.gathers_layers else 0
        first = gradients if several else 0
        parameters = sizes.layers * sizes.layer + sizes.ends
        last = gradients if several else gradients * (1 - (sizes.layer + sizes.ends - sizes.head) / parameters)
        return _largest(
            ("gradients", "gathered weights", "activations"),
            at_head,
            (first, stay, all_kept + norm),
            # weights of the layer and of the next; gradients of the one before in float32, and then its own
            (first, stay + coming, all_kept + backward),
            (first, stay + coming + reduced, all_kept - kept + backward),
            (first, stay + coming + layer + reduced, all_kept - kept + norm),
            (last, stay + coming, kept + backward),
            (last, stay + coming + layer + reduced, norm),
            (gradients, (4 + width) * sizes.ends // split if engine.gathers_layers else 0, 0),
        )

    def whole_tensor(self) -> float:
        """Returns the bytes that the largest tensor takes while it is read in bfloat16; twice that is in float32."""
        is_cast = isinstance(self.engine, TorchConfig) and self.width == 4
        return self.sizes.gathered if self.engine.gathers_layers or is_cast else 0

    @property
    def _gathered(self) -> tuple[int, int, int]:
        """Bytes of gathered weights: of those that stay, of those outside the layers, and of a layer."""
        sizes, engine = self.sizes, self.engine
        if not engine.gathers_layers:
            return 0, 0, 0
        ends, layer = (self.width * count // engine.matrix_split for count in (sizes.ends, sizes.layer))
        keeps = isinstance(engine, FSDPConfig) and not engine.reshard_after_forward
        return ends + keeps * sizes.layers * layer, ends, layer


def _largest(names: tuple[str, ...], *moments: tuple[float, ...]) -> dict[str, float]:
    return dict(zip(names, max(moments, key=sum), strict=True))


def _width(model: ModelConfig) -> int:
    return 2 if model.dtype == "bfloat16" else 4


def check_fits(utilization: float, total: float, held: Mapping[str, float]) -> None:
    """Raises UserError if vLLM cannot have the share of a GPU that it asks for.

    Args:
        utilization: `rollout.engine.gpu_memory_utilization`.
        total: memory of the GPU in bytes.
        held: bytes of it that others hold, by holder.
    """
    left = total - sum(held.values())
    if utilization * total <= left:
        return
    parts = " + ".join(f"{what} {size / GIB:.1f}" for what, size in held.items())
    largest = math.floor(100 * left / total) / 100
    lower = f"lower it to {largest:.2f}, or " if largest > 0 else ""
    raise UserError(
        f"rollout.engine.gpu_memory_utilization {utilization:g} of {total / GIB:.1f} GiB is "
        f"{utilization * total / GIB:.1f} GiB, but {parts} GiB stay on the GPU, which leaves {max(left, 0) / GIB:.1f}: "
        f"{lower}let the models take turns (actor.offload_when_idle, critic.offload_when_idle)"
    )


def await_room(
    utilization: float, free_and_total: Callable[[], tuple[int, int]], *, wait_s: float = ROOM_S, every_s: float = 0.2
) -> None:
    """Waits until vLLM can have the share of a GPU that it asks for; raises UserError after `wait_s` seconds."""
    for attempt in Retrying(
        retry=retry_if_exception_type(UserError), stop=stop_after_delay(wait_s), wait=wait_fixed(every_s), reraise=True
    ):
        with attempt:
            free, total = free_and_total()
            check_fits(utilization, total, {"other models and processes": total - free})


def check_config(config: RunConfig, vllm: VLLMConfig, roles: Iterable[str], total: float) -> None:
    """Raises UserError if vLLM does not fit beside the other models of its processes, before anything is loaded."""
    models = {role: model for role, model in config.models.items() if role in roles}
    counts = {role: parameter_count(model_folder(model)) for role, model in models.items()}
    pool = config.pool_of("rollout")
    ranks = 1 if pool is None else config.pools[pool].workers
    check_fits(vllm.gpu_memory_utilization, total, resident(config, counts, ranks))
