"""Estimates the memory that computing with a decoder takes, from the sizes in its config.

Each layer keeps for the backward pass what its operations read: in bfloat16 the inputs of products and of the MLP's
activation, queries, keys, values and outputs of attention, and for each norm also its input in float32. The estimates
are held to what engines allocate on a simulated GPU (tests/contract/on_hollow.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ratchet.rlhf.config.engines import FSDPConfig, TorchConfig
from ratchet.rlhf.models.token_outputs import BLOCK_BYTES, LOGITS_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ratchet.rlhf.config.engines import TrainEngineConfig
    from ratchet.rlhf.models.activation_checkpointing import Checkpointing

BLOCKS = 3
"""Blocks of float32 logits that are in memory at the same time."""


@dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """Numbers of elements in a decoder: of a token in a layer, and of parameters."""

    layers: int
    hidden: int
    heads: int
    queries: int
    """A token's queries, or the output of its attention."""
    keys: int
    """A token's keys, or its values."""
    inner: int
    """What a token has within an MLP, in all experts that compute it."""
    experts: int
    """Experts of a layer; 0: there are none."""
    routed: int
    """Experts that compute a token."""
    normed: int
    """A token's queries and keys, if they are normalized."""
    vocabulary: int
    layer: int
    """Parameters of a layer."""
    head: int
    """Parameters of the head; 0 for one without a vocabulary."""
    ends: int
    """Parameters outside the layers."""
    gathered: int
    """Bytes of the largest tensor in float32, or of two in bfloat16."""
    is_tied: bool
    """True if the head is the embedding."""

    @classmethod
    def of(cls, config: PreTrainedConfig, *, is_policy: bool) -> DecoderSizes | None:
        """Reads the sizes from a config; None if it lacks them, as that of a model without attention."""
        text = config.get_text_config().to_dict()
        if any(text.get(key) is None for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")):
            return None
        hidden, heads = text["hidden_size"], text["num_attention_heads"]
        dim = text.get("head_dim") or hidden // heads
        queries, keys = heads * dim, (text.get("num_key_value_heads") or heads) * dim
        counts = (text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        experts = next((count for count in counts if count), 0)
        routed = (text.get("num_experts_per_tok") or 1) if experts else 0
        dense = text.get("intermediate_size") or 4 * hidden
        width = text.get("moe_intermediate_size") or dense
        shared = (text.get("n_shared_experts") or 0) * width + (text.get("shared_expert_intermediate_size") or 0)
        inner = routed * width + shared if experts else dense
        stored = experts * width + shared if experts else dense
        matrix = text["vocab_size"] * hidden
        is_tied = is_policy and bool(text.get("tie_word_embeddings"))
        return cls(
            layers=text["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            queries=queries,
            keys=keys,
            inner=inner,
            experts=experts,
            routed=routed,
            normed=queries + keys if text["model_type"].startswith("qwen3") else 0,  # no field says so
            vocabulary=text["vocab_size"],
            layer=2 * hidden * (queries + keys) + 3 * hidden * stored + experts * hidden,
            head=matrix if is_policy else 0,
            ends=matrix if is_tied or not is_policy else 2 * matrix,
            # parts of experts may have to be interleaved
            gathered=max(4 * matrix, 5 * 2 * experts * hidden * width, 4 * hidden * dense),
            is_tied=is_tied,
        )

    def kept(self, width: int, checkpointing: Checkpointing, split: int) -> int:
        """Returns the bytes of a token that each layer keeps until its backward pass.

        Args:
            width: bytes of an element in the type of the computation.
            split: number of processes that split each matrix.
        """
        if checkpointing is True:
            return width * self.hidden
        if checkpointing is False:
            return self.whole(width, split)
        # of the products every second one, see `activation_checkpointing`; those of experts are no such products
        mlp = 0 if self.routed else self.inner // split + self.hidden
        attention = (2 * self.queries + self.keys) // split
        return width * (self.hidden + attention + mlp) + 4 * self.heads // split

    def whole(self, width: int, split: int, *, fused: bool = False) -> int:
        """Returns the bytes of a token that a layer needs in its backward pass.

        Args:
            fused: norms and activations keep only their inputs.
        """
        attention = (2 * width * (self.queries + self.keys) + 4 * self.heads) // split
        experts = 2 * width * self.routed * self.hidden
        if fused:
            return attention + experts + 2 * width * (self.hidden + self.inner // split)
        norms = 2 * (4 + 2 * width) * self.hidden + (4 + width) * self.normed // split
        return attention + experts + norms + 4 * width * self.inner // split

    def backward(self, width: int, checkpointing: Checkpointing, split: int, *, fused: bool) -> int:
        """Returns the bytes of a token that the backward pass of a layer takes beyond `kept`."""
        within = max(2 * self.inner // split, 3 * self.routed * self.hidden)
        # a selection keeps outputs of the MLP, which nothing reads
        beside = 3 if checkpointing == "selective" and not self.routed else 2
        gradients = width * (within + beside * self.hidden)
        recomputed = self.whole(width, split, fused=fused) - self.kept(width, checkpointing, split)
        return max(recomputed, 0) + gradients

    def forward(self, width: int, split: int) -> int:
        """Returns the bytes of a token that a forward pass without gradients takes."""
        within = max(3 * self.inner // split, 3 * self.routed * self.hidden)
        return width * (within + 4 * self.hidden)

    def of_head(self, tokens: int, width: int, split: int, *, learns: bool, block: int) -> int:
        """Returns the bytes that the head takes for so many tokens, in the backward pass if it learns.

        `block` is the size of a block of `BLOCK_BYTES`.
        """
        hidden = (4 + 2 * width) * self.hidden * tokens if learns else 0
        if not self.head:
            return hidden
        limit = LOGITS_BYTES if learns else min(LOGITS_BYTES, 4 * block)
        logits, gradient = 4 * tokens * self.vocabulary // split, width * self.head // split * learns
        # a team computes all logits of a piece together, in float32
        temporary = BLOCKS * min(logits, block) if split == 1 else (BLOCKS + learns) * min(logits, limit)
        piece = width * min(logits, limit) // 4 + temporary + gradient
        # the gradient so far, that of a piece, and their sum
        return max(piece, 3 * gradient if logits > limit else 0) + hidden

    def of_first_norm(self, width: int) -> int:
        """Returns the bytes of a token that the backward pass of a norm takes."""
        return (20 + 2 * width) * self.hidden


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
    shards: int = 1
    """Number of processes that share each weight, if layers are gathered."""
    kind: Literal["cpu", "gpu"] = "gpu"
    """Kind of the device."""

    def log_probs(self, tokens: int) -> dict[str, float]:
        """Returns the bytes that a micro-batch takes without gradients, by what they hold."""
        sizes, split = self.sizes, self.engine.matrix_split
        tokens //= self.engine.token_split
        stay, ends, layer = self._gathered
        own = 0 if stay > ends else layer
        # cut by their rows; see `fsdp_engine`
        interleaved = layer if sizes.experts % self.shards else 0
        computed = sizes.forward(self.width, split) * tokens
        return _largest(
            ("gathered weights", "activations"),
            # PyTorch frees a gathered buffer only when the next layer is there
            (stay + ends + own + layer + interleaved, 0),
            (stay + own + 2 * layer + interleaved, 0),
            (stay + own + layer, computed),
            (stay, sizes.of_head(tokens, self.width, split, learns=False, block=BLOCK_BYTES[self.kind])),
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
        at_head = (
            gradients if several else 0,
            stay,
            all_kept + sizes.of_head(tokens, width, split, learns=True, block=BLOCK_BYTES[self.kind]),
        )
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
        """Returns the bytes that the largest tensor takes while all are read: in float32 itself, in bfloat16 with the
        one before."""
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
