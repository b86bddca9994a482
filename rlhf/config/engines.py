"""The engines that a config can choose: the options of each, and facts about it that other modules read.

`type` chooses the engine, and a key of another engine is refused. `rlhf/train/build.py` and `rlhf/rollout/build.py`
build the chosen engine.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, ValidationInfo, model_validator

from ratchet.rlhf.config.engine_args import DEEPSPEED_SPEED, VLLM_SPEED, check_deepspeed, check_vllm
from ratchet.rlhf.config.section import OneOrMore, Section, type_may_be_left_out


class EngineConfig(Section):
    """An engine's options. Its class variables are facts about the engine."""

    extra: ClassVar[str | None] = None
    """The extra of Ratchet that installs the engine's package."""
    package: ClassVar[str | None] = None
    """The package that must be importable where the engine runs."""


class TrainEngineConfig(EngineConfig):
    """A train engine."""

    needs_gpu: ClassVar[bool] = False
    own_layers: ClassVar[bool] = False
    """It computes with its own layers, which have no adapters and no other kernels or attention."""
    args: dict[str, JsonValue] = Field({}, description="more keys of DeepSpeed's config; only with deepspeed")

    @model_validator(mode="after")
    def _args_may_be_set(self, info: ValidationInfo) -> Self:
        if info.context is None:  # else a stage's committed keys are set, and its engine may be another one now
            self.check_args()
        return self

    def check_args(self) -> None:
        """Raises ValueError for arguments that cannot be passed on to the engine's package."""
        if self.args:
            raise ValueError("args are for engine deepspeed: remove them")

    @property
    def teams(self) -> dict[str, int]:
        """Numbers of adjacent processes that compute together, by the keys that ask for them."""
        return {}

    @property
    def matrices_are_split(self) -> bool:
        """True if transformers' layers are split over processes, which compiled kernels and adapters do not support."""
        return False

    @property
    def compiles(self) -> bool:
        """True if layers can be compiled."""
        return not self.matrices_are_split

    @property
    def moves_state(self) -> bool:
        """True if the model and its optimizer can move to host memory and back."""
        return True

    @property
    def keeps_state_on_host(self) -> bool:
        """True if the state is always in host memory."""
        return False

    @property
    def whole_model(self) -> bool:
        """True if each process has the whole model and computes whole sequences, so that it can generate with it."""
        return False

    @property
    def matrix_split(self) -> int:
        """Number of processes that split each matrix."""
        return 1

    @property
    def token_split(self) -> int:
        """Number of processes that split each sequence."""
        return 1

    @property
    def layer_split(self) -> int:
        """Number of groups of processes that split the layers."""
        return 1

    @property
    def gathers_layers(self) -> bool:
        """True if the weights of a layer are gathered when it computes."""
        return False

    def frozen_share(self, ranks: int) -> float:
        """Returns the share of a frozen model's weights that each of `ranks` devices holds."""
        return 1.0

    def gradient_share(self, ranks: int) -> float:
        """Returns the share of the float32 gradients that each of `ranks` devices holds."""
        return 1.0

    @abstractmethod
    def held(self, weights: int, learned: int, moments: float, width: int, ranks: int) -> tuple[float, float]:
        """Estimates the bytes of weights and of optimizer state that each device holds between updates.

        Args:
            learned: number of weights that the optimizer updates.
            moments: bytes of the optimizer's moments.
            width: bytes of a weight in the type of the computation.
        """


class _SplitsSequences(TrainEngineConfig):
    sequence_parallel: int = Field(
        1, gt=0, description="processes that split each sequence between them (Ulysses), for long sequences"
    )

    @property
    def teams(self) -> dict[str, int]:
        return {"sequence_parallel": self.sequence_parallel}

    @property
    def token_split(self) -> int:
        return self.sequence_parallel


class TorchConfig(_SplitsSequences):
    """Plain PyTorch: every process holds the whole model."""

    type: Literal["torch"] = "torch"

    @property
    def whole_model(self) -> bool:
        return self.sequence_parallel == 1

    def held(self, weights: int, learned: int, moments: float, width: int, ranks: int) -> tuple[float, float]:
        if width == 2:  # rounded weights, and those of the optimizer
            return 2 * weights, 4 * learned + moments
        return 4 * weights, moments


class FSDPConfig(_SplitsSequences):
    """PyTorch's FSDP2: the state is sharded, and gathered layer by layer."""

    type: Literal["fsdp"] = "fsdp"
    tensor_parallel: int = Field(
        1, gt=0, description="processes that split each layer's matrices between them, for large models"
    )
    shard_size: int | None = Field(
        None,
        gt=0,
        description="processes that shard the state between them, such as those of a machine; every such group holds "
        "all of it (HSDP); null: all processes",
    )
    reshard_after_forward: bool = Field(
        True,
        description="free a layer's gathered weights after its forward pass; false: gather weights and sum gradients "
        "once per mini-batch, which is faster, but holds all weights and float32 gradients on each device",
    )
    offload: bool = Field(False, description="keep the optimizer state and the sharded parameters in host memory")

    @model_validator(mode="after")
    def _teams_fit(self) -> Self:
        if self.tensor_parallel > 1 and self.sequence_parallel > 1:
            raise ValueError("tensor_parallel and sequence_parallel do not work together: remove one of them")
        if self.shard_size is not None and self.shard_size % self.tensor_parallel:
            raise ValueError(
                f"shard_size is {self.shard_size}, which is no multiple of tensor_parallel {self.tensor_parallel}: "
                "raise it"
            )
        return self

    @property
    def teams(self) -> dict[str, int]:
        return {**super().teams, "tensor_parallel": self.tensor_parallel}

    @property
    def matrices_are_split(self) -> bool:
        return self.tensor_parallel > 1

    @property
    def keeps_state_on_host(self) -> bool:
        return self.offload

    @property
    def matrix_split(self) -> int:
        return self.tensor_parallel

    @property
    def gathers_layers(self) -> bool:
        return True

    def _share(self, ranks: int) -> float:
        """Returns the share of the state that each of `ranks` devices holds."""
        return 1 / min(self.shard_size or ranks, ranks)

    def frozen_share(self, ranks: int) -> float:
        return 0.0 if self.offload else self._share(ranks)

    def gradient_share(self, ranks: int) -> float:
        return 0.0 if self.offload else self._share(ranks)

    def held(self, weights: int, learned: int, moments: float, width: int, ranks: int) -> tuple[float, float]:
        share = self._share(ranks)
        return (0, 0) if self.offload else (4 * weights * share, moments * share)


class DeepSpeedConfig(_SplitsSequences):
    """DeepSpeed's ZeRO."""

    extra: ClassVar[str | None] = "deepspeed"
    package: ClassVar[str | None] = "deepspeed"
    operational = frozenset(f"args.{key}" for key in DEEPSPEED_SPEED)
    type: Literal["deepspeed"] = "deepspeed"
    zero_stage: Literal[0, 1, 2, 3] = Field(
        2,
        description="1 shards the optimizer state (with bfloat16 also the gradients), 2 also the gradients, 3 also the "
        "parameters",
    )
    offload: bool = Field(
        False, description="keep the optimizer state, and with zero_stage 3 the parameters, in host memory"
    )

    def check_args(self) -> None:
        check_deepspeed(self.args)

    @property
    def compiles(self) -> bool:
        return False

    @property
    def moves_state(self) -> bool:
        return self.zero_stage < 3

    @property
    def gathers_layers(self) -> bool:
        return self.zero_stage == 3

    @property
    def keeps_state_on_host(self) -> bool:
        return self.offload

    def frozen_share(self, ranks: int) -> float:
        if self.zero_stage < 3:
            return 1.0
        return 0.0 if self.offload else 1 / ranks

    def gradient_share(self, ranks: int) -> float:
        return 1 / ranks if self.zero_stage >= 2 else 1.0

    def held(self, weights: int, learned: int, moments: float, width: int, ranks: int) -> tuple[float, float]:
        if self.zero_stage == 0:
            return 4 * weights, moments
        copy = width * weights / (ranks if self.zero_stage == 3 else 1)
        if self.offload:
            return (0 if self.zero_stage == 3 else copy), 0
        return copy, (4 * learned + moments) / ranks  # its float32 weights are the optimizer's


class MegatronConfig(TrainEngineConfig):
    """Megatron-Core, on GPUs."""

    extra: ClassVar[str | None] = "megatron"
    package: ClassVar[str | None] = "megatron.core"
    needs_gpu: ClassVar[bool] = True
    own_layers: ClassVar[bool] = True
    type: Literal["megatron"] = "megatron"
    tensor_parallel: int = Field(
        1, gt=0, description="processes that split each layer's matrices between them, for large models"
    )
    pipeline_parallel: int = Field(1, gt=0, description="groups of such processes that split the layers between them")
    context_parallel: int = Field(
        1, gt=0, description="processes that split each sequence between them, for long sequences"
    )
    expert_parallel: int = Field(
        1, gt=0, description="processes that split the experts of each layer of a mixture between them"
    )
    distributed_optimizer: bool = Field(
        True, description="copies of the model shard the optimizer's weights and state; false: each has all of it"
    )

    @property
    def teams(self) -> dict[str, int]:
        layers = ("tensor_parallel", "context_parallel", "pipeline_parallel")
        products: dict[str, int] = {}
        for keys in (layers, ("expert_parallel", "pipeline_parallel")):
            sizes = {key: getattr(self, key) for key in keys if getattr(self, key) > 1}
            products[" x ".join(sizes)] = math.prod(sizes.values())
        return products

    @property
    def matrix_split(self) -> int:
        return self.tensor_parallel

    @property
    def token_split(self) -> int:
        return self.context_parallel

    @property
    def layer_split(self) -> int:
        return self.pipeline_parallel

    @property
    def _split_over(self) -> int:
        """Number of processes that a model is split over."""
        # most of a mixture of experts is experts
        by_layer = self.expert_parallel if self.expert_parallel > 1 else self.tensor_parallel
        return by_layer * self.pipeline_parallel

    def frozen_share(self, ranks: int) -> float:
        return 1 / self._split_over

    def gradient_share(self, ranks: int) -> float:
        return 1 / self._split_over

    def held(self, weights: int, learned: int, moments: float, width: int, ranks: int) -> tuple[float, float]:
        rounded = 4 * learned if width == 2 else 0  # the optimizer's own weights
        sharded_over = ranks if self.distributed_optimizer else self._split_over
        return width * weights / self._split_over, (rounded + moments) / sharded_over


class RolloutEngineConfig(EngineConfig):
    """A rollout engine."""

    in_batches: ClassVar[bool] = False
    """It generates in fixed batches; see `RolloutEngine.in_batches`."""
    own_process: ClassVar[bool] = True
    """It computes in its own processes, beside the trainer."""
    own_seeds: ClassVar[bool] = True
    """It can draw with its own seed; see `rollout.seeds`."""
    outlives_runs: ClassVar[bool] = False
    """It was started by the user, and may hold weights of another run."""
    loads_adapters: ClassVar[bool] = True
    returns_routes: ClassVar[bool] = True
    """It can tell to which experts tokens went; see `rollout.router_replay`."""

    @property
    def scores_texts(self) -> bool:
        """True if it can compute the log-probs of given tokens; see `rollout.canary`."""
        return True

    @property
    def rounds_weights(self) -> bool:
        """True if it generates with weights of fewer bits than the trainer's."""
        return False

    @property
    def devices(self) -> int:
        """Number of GPUs that one engine spans."""
        return 1

    @property
    def takes_weights(self) -> bool:
        """True if it can get new weights, so that a policy can be trained with it."""
        return True


class HFConfig(RolloutEngineConfig):
    """transformers, in the trainer's process."""

    in_batches: ClassVar[bool] = True
    own_process: ClassVar[bool] = False
    own_seeds: ClassVar[bool] = False
    type: Literal["hf"] = "hf"


class VLLMConfig(RolloutEngineConfig):
    """vLLM. Its keys change only rounding, except for `quantization` and some of `args`."""

    extra: ClassVar[str | None] = "vllm"
    package: ClassVar[str | None] = "vllm"
    operational = frozenset(
        (
            "gpu_memory_utilization",
            "tensor_parallel",
            "max_model_len",
            "enforce_eager",
            "prefix_caching",
            "cpu_cache_gib",
            "timeout_s",
            *(f"args.{name}" for name in VLLM_SPEED),
        )
    )
    type: Literal["vllm"] = "vllm"
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of each GPU's memory that vLLM uses")
    tensor_parallel: int = Field(
        1, gt=0, description="GPUs that share the model; in a pool they may belong to several adjacent workers"
    )
    max_model_len: int | None = Field(
        None,
        gt=0,
        description="largest sum of prompt and response tokens; null: data.max_prompt_tokens plus "
        "rollout.max_response_tokens",
    )
    quantization: Literal["fp8"] | None = Field(None, description="generate with 8-bit weights; null: not quantized")
    enforce_eager: bool = Field(False, description="no CUDA graphs: starts faster, generates slower")
    prefix_caching: bool = Field(True, description="compute a prompt once for all its trajectories")
    cpu_cache_gib: int = Field(1, gt=0, description="memory of the key-value cache without a GPU, in GiB")
    timeout_s: float = Field(
        600.0, gt=0, description="vLLM is restarted if it makes no progress for so long, in seconds"
    )
    args: dict[str, JsonValue] = Field(
        {}, description="more arguments of vLLM (EngineArgs), such as {max_num_seqs: 64}; see docs/rollouts.md"
    )

    @model_validator(mode="after")
    def _args_may_be_set(self) -> Self:
        check_vllm(self.args)
        return self

    @property
    def rounds_weights(self) -> bool:
        return self.quantization is not None or "quantization" in self.args

    @property
    def devices(self) -> int:
        return self.tensor_parallel


class ServerConfig(RolloutEngineConfig):
    """Inference servers that the user runs."""

    operational = frozenset(("urls", "api", "weights_folder", "timeout_s"))
    outlives_runs: ClassVar[bool] = True
    loads_adapters: ClassVar[bool] = False
    returns_routes: ClassVar[bool] = False
    type: Literal["server"] = "server"
    urls: OneOrMore[str] = Field(min_length=1, description="addresses of the servers, such as http://127.0.0.1:8000")
    api: Literal["vllm", "sglang", "tgi"] = Field(
        "vllm", description="kind of server: vllm serve, SGLang, or Text Generation Inference (evaluation only)"
    )
    weights_folder: str | None = Field(
        None,
        description="folder for new weights, at the same path on every server; null: they are broadcast to SGLang "
        "servers, and other servers are for evaluation only",
    )
    timeout_s: float = Field(
        600.0, gt=0, description="a server that makes no progress for so long, in seconds, is asked again or left out"
    )

    @property
    def scores_texts(self) -> bool:
        return self.api != "tgi"

    @property
    def takes_weights(self) -> bool:
        return self.weights_folder is not None or self.api == "sglang"


ENGINES: dict[str, type[EngineConfig]] = {
    "torch": TorchConfig,
    "fsdp": FSDPConfig,
    "deepspeed": DeepSpeedConfig,
    "megatron": MegatronConfig,
    "hf": HFConfig,
    "vllm": VLLMConfig,
    "server": ServerConfig,
}
TrainEngine = Annotated[
    TorchConfig | FSDPConfig | DeepSpeedConfig | MegatronConfig,
    Field(discriminator="type"),
    type_may_be_left_out("torch"),
]
RolloutEngine = Annotated[HFConfig | VLLMConfig | ServerConfig, Field(discriminator="type"), type_may_be_left_out("hf")]
