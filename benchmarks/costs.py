"""Computes the costs of an iteration on paper: parameters, FLOPs, and the bytes moved and held.

Pure formulas, in bytes, FLOPs and seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ratchet.rlhf.distributed.gpus import KNOWN

FLOAT32, BFLOAT16 = 4, 2

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Model:
    """The shape of a Llama or a Qwen 2."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    tied: bool
    """True if the embedding is also the head."""
    biased: bool
    """True if q, k and v have biases."""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def keys(self) -> int:
        """Width of the keys of a token, and of its values."""
        return self.key_value_heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        return self.hidden * (2 * self.hidden + 2 * self.keys + 3 * self.intermediate)

    @property
    def layer_parameters(self) -> int:
        """All elements of a layer: matrices, biases and two norms."""
        return self.layer_weights + (self.hidden + 2 * self.keys) * self.biased + 2 * self.hidden

    @property
    def parameters(self) -> int:
        ends = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + ends + self.hidden

    @property
    def key_value_bytes(self) -> int:
        """Bytes of a token in the key-value cache, in bfloat16."""
        return BFLOAT16 * 2 * self.layers * self.keys

    def forward_flops(self, tokens: float, attended: float, predicted: float) -> float:
        """Returns the FLOPs of a forward pass; a backward pass takes twice as many.

        Args:
            tokens: Tokens that are computed.
            attended: Pairs of a token and a token that it attends to.
            predicted: Tokens whose logits are computed.
        """
        matrices = 2 * self.layers * self.layer_weights * tokens
        attention = 4 * self.layers * self.heads * self.head_dim * attended
        return matrices + attention + 2 * self.vocabulary * self.hidden * predicted

    def activation_bytes(self, checkpointing: Checkpointing) -> int:
        """Returns the bytes per token that a forward pass keeps for the backward pass, without the head.

        Args:
            checkpointing: none: everything. full: only the input of each layer. selective: also the outputs of
                attention and of every second matrix product.
        """
        if checkpointing == "full":
            return self.layers * BFLOAT16 * self.hidden
        products = 3 * self.hidden + 2 * self.keys + 2 * self.intermediate  # q, o, down; k, v; gate, up
        if checkpointing == "selective":
            return self.layers * BFLOAT16 * (2 * self.hidden + products // 2)
        # a norm keeps its input in float32 and what it has normalized
        norms = 2 * (FLOAT32 + BFLOAT16) * self.hidden
        inputs = 2 * BFLOAT16 * self.hidden
        attention = BFLOAT16 * (2 * self.hidden + 2 * self.keys)  # q, k, v, and what is returned
        mlp = BFLOAT16 * 4 * self.intermediate  # gate, its activation, up, their product
        return self.layers * (norms + inputs + attention + mlp)


MODELS = {
    model.name: model
    for model in (
        Model("0.5B", 896, 4864, 24, 14, 2, 151936, tied=True, biased=True),  # Qwen2.5-0.5B
        Model("7B", 3584, 18944, 28, 28, 4, 152064, tied=False, biased=True),  # Qwen2.5-7B
        Model("32B", 5120, 27648, 64, 40, 8, 152064, tied=False, biased=True),  # Qwen2.5-32B
        Model("70B", 8192, 28672, 80, 64, 8, 128256, tied=False, biased=False),  # Llama-3.1-70B
    )
}


@dataclass(frozen=True)
class Hardware:
    """A GPU and its connections, by their data sheets: bytes per second in one direction."""

    name: str
    flops: float
    """Dense bfloat16."""
    memory: float
    hbm: float
    nvlink: float = 450e9
    pcie: float = 55e9
    nic: float = 50e9
    """Per GPU, to other nodes."""
    disk: float = 2e9
    """Per node, to a disk or an object store."""
    gpus_per_node: int = 8

    def gathering(self, size: float, gpus: int) -> float:
        """Returns the seconds until every GPU has all of `size` bytes that are sharded over the GPUs.

        Within a node, each GPU receives the others' shards through NVLink; a node receives the other nodes' through its
        NICs. Both run at the same time.
        """
        nodes = -(-gpus // self.gpus_per_node)
        within = min(gpus, self.gpus_per_node)
        inside = size * (within - 1) / within / self.nvlink
        across = size * (nodes - 1) / nodes / (self.nic * self.gpus_per_node)
        return max(inside, across)


HARDWARE = {
    "H100": Hardware("H100", KNOWN["h100"].bf16_flops, 80e9, 3.35e12),
    "H200": Hardware("H200", KNOWN["h200"].bf16_flops, 141e9, 4.8e12),
}


@dataclass(frozen=True)
class Lengths:
    """Lengths of trajectories by prompt, in tokens."""

    prompt: int
    responses: np.ndarray
    """Shape (prompts, n)."""

    @classmethod
    def drawn(cls, prompts: int, n: int, prompt: int, response: int, longest: int) -> Lengths:
        """Draws log-normal lengths of responses.

        Args:
            prompts: Number of prompts.
            n: Responses per prompt.
            prompt: Tokens of every prompt.
            response: Mean tokens of a response, before the limit.
            longest: Limit on the tokens of a response.
        """
        # the mean of this log-normal is 1
        noise = np.random.default_rng(0).lognormal(-(0.7**2) / 2, 0.7, (prompts, n))
        return cls(prompt, np.clip(response * noise, 1, longest).astype(np.int64))

    @property
    def count(self) -> int:
        return self.responses.size

    @property
    def tokens(self) -> int:
        """Tokens of all trajectories, prompts included."""
        return int(self.responses.sum()) + self.prompt * self.count

    @property
    def attended_by_responses(self) -> int:
        """Pairs of a response token and an earlier token: decoding's reads of the key-value cache, in tokens."""
        responses = self.responses
        return int((responses * self.prompt + responses * (responses + 1) // 2).sum())


@dataclass(frozen=True)
class Assumed:
    """Assumed shares of the hardware's rates that software reaches, neither measured here nor in a data sheet."""

    mfu: float = 0.40
    """Share of peak FLOPs that the passes of the trainer reach, the goal; FLOPs of recomputation do not count."""
    decode: float = 0.7
    """Share of memory bandwidth that decoding reaches."""
    links: float = 0.75
    """Share of the rates of NVLink and NICs that collectives reach."""
    step_s: float = 1e-3
    """Seconds of a decoding step beyond memory traffic: scheduling and launching."""
    reduce_s: float = 15e-6
    """Latency of an all-reduce within a node, twice per layer of a tensor-parallel engine."""
    pageable: float = 5e9
    """Bytes per second and GPU between the device and memory that is not pinned."""
    host: float = 200e9
    """Bytes per second that all processes of a node together can copy in host memory."""


ASSUMED = Assumed()


def slowed(hardware: Hardware) -> Hardware:
    return replace(hardware, nvlink=hardware.nvlink * ASSUMED.links, nic=hardware.nic * ASSUMED.links)
