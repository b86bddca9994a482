"""Outputs of a model at selected tokens: log-probs and entropy, values, or scores.

Logits are computed only for these tokens, in pieces, so that the whole tensor (tokens x vocabulary) is never in memory;
if gradients are needed, they are recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ratchet.rlhf.distributed import accelerator, ranks
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models import prefix_sharing
from ratchet.rlhf.models.kernels import apply_liger, compile_layers, compiled, liger_log_probs
from ratchet.rlhf.models.prefix_sharing import agree
from ratchet.rlhf.models.router_loss import NAME as ROUTER_LOSS
from ratchet.rlhf.models.router_loss import RouterLoss
from ratchet.rlhf.models.routes import OWN, FollowsRoutes, Routers
from ratchet.rlhf.models.segments import Segments
from ratchet.rlhf.models.sequence_parallel import OwnTokens, Team
from ratchet.rlhf.models.truncated import truncated

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import PreTrainedModel

    from ratchet.rlhf.config.sections import Kernels
    from ratchet.rlhf.models.prefix_sharing import SharedPrompts

Head = Literal["policy", "value", "reward"]
LOGITS_BYTES = 2**29
"""Maximum size of a piece of float32 logits, which is in memory once, also in the backward pass."""
BLOCK_BYTES = {"cpu": 2**23, "gpu": 2**26}
"""Size of the float32 logits that the log-probs are computed of at a time, by the type of device; a few such blocks are
in memory. On a CPU they stay in its cache, and in memory that the process already has."""


@dataclass(frozen=True)
class VocabularyShare:
    """This process's part of the head, in a team that splits it by vocabulary."""

    group: dist.ProcessGroup
    first: int
    """The part's first token; its size is that of the logits."""
    members: int
    """Number of processes in the team."""


TOP_K = frozenset({"topk_ids", "topk_log_probs"})
"""Outputs with several values for each token."""
NO_MASS = -100.0
"""Stands for the log-prob of what has no probability: e to this power is 0 beside any that float32 adds to it."""


class TokenOutputs(torch.nn.Module):
    """The module that an engine shards and calls; the parameters of the model inside keep their names."""

    def __init__(
        self,
        model: PreTrainedModel,
        head: Head,
        *,
        team: Team | None = None,
        packing: bool = False,
        share_prompts: bool = False,
        varlen: bool = False,
        follows_routes: bool = False,
    ) -> None:
        """Wraps a model and checks that it computes correct results.

        Args:
            model: the model; it may be on the meta device. The check computes with a small one of its architecture.
            head: outputs of the model: `policy` (log-probs and entropy), `value` (values) or `reward` (scores).
            team: the processes that split each sequence; None: sequences are not split.
            follows_routes: tokens may be given the experts that they go to.

        Raises:
            UserError: the log-probs would be wrong, or the model does not support `team`, `packing`, the head or
                routes.
        """
        super().__init__()
        if team is not None:
            team.check(model)
        attention = model.config._attn_implementation
        # these work on any device, and in float32
        is_plain = attention in ("sdpa", "eager", prefix_sharing.NAME)
        tried = truncated(model, attention=attention if is_plain else "sdpa", teams_of=1 if team is None else team.size)
        # `_check` computes with the small model
        self.model = tried.to(accelerator.device())
        self.head = head
        self.team = team
        self.router_loss = RouterLoss.of(model) if head == "policy" else None
        """The auxiliary loss of a mixture of experts; None if the model has none, or its config does not ask for it."""
        self.in_step = False
        """True if all ranks must call the head equally often, because each call gathers its weights."""
        self.kernels: Kernels = "torch"
        """Implementation of the layers and the log-probs."""
        self.vocabulary: VocabularyShare | None = None
        """This process's part of the head; None: all of it."""
        asked = share_prompts or varlen or packing
        is_adopted = asked and team is None and is_plain and prefix_sharing.adopt(tried)
        self.shares_prompts = share_prompts and is_adopted
        """True if the model computes a row of shared prompts."""
        self.varlen = varlen and is_adopted
        """True if shared prompts are always described by `Segments`, and packing is as fast as padding."""
        self.takes_segments = is_adopted or team is not None
        """True if a row of several sequences is computed as `Segments`; otherwise by its positions."""
        # before the check, which leaves the small model to a team
        self.routers: FollowsRoutes | None = Routers.of(model, tried) if follows_routes else None
        """The routers of the model, which take given experts; None: they always choose."""
        self._check(packing)
        self.model = model
        if is_adopted:
            prefix_sharing.follow(model)
        elif team is not None:
            model.set_attn_implementation(tried.config._attn_implementation)

    def forward(
        self,
        input_ids: Int[Tensor, "sequences time"],
        position_ids: Int[Tensor, "*axes sequences time"] | None,
        at: Int[Tensor, " tokens"],
        targets: Int[Tensor, " tokens"],
        temperature: float,
        outputs: tuple[str, ...],
        shared: SharedPrompts | Segments | None = None,
        copies: Int[Tensor, "sequences time"] | None = None,
        own: OwnTokens | None = None,
        top: Int[Tensor, "tokens k"] | int = 0,
        routes: Int[Tensor, "sequences time slots"] | None = None,
        images: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[str, Tensor]:
        """Computes outputs at selected positions.

        Args:
            position_ids: same shape, perhaps with a first dimension of axes; None: counted from the left.
            at: indices in the flattened `input_ids` of the positions that predict the targets, shape (tokens,).
            outputs: names of the outputs; `entropy` and `sum_pi_squared` are optional, and the latter has no gradient.
            shared: how the tokens of a row of several sequences attend to each other; None: each row is a sequence.
            copies: number of sequences that each token is part of, shape (sequences, time); None: the router's
                auxiliary loss is not computed.
            own: the targets in this process's share, if a team splits the sequences; None: they are found, for which a
                GPU waits.
            top: tokens of the vocabulary for each position; or a number, for the most likely ones; 0: none.
            routes: the experts of each token, layer by layer, which the routers also take if activations are
                recomputed for the gradient; None: the routers choose.
            images: further arguments of the model's forward, for the images among the tokens.

        Returns:
            Outputs by name, float32, shape (tokens,): `log_probs` and `entropy` in nats and `sum_pi_squared`, `values`,
            or `scores`; and the scalar `router_aux_loss` if `copies` is given. With `top`, also the log-probs of these
            tokens, `topk_log_probs`, shape (tokens, k), and of all others together, `tail_log_probs`; with a number
            also `topk_ids`, which float32 holds exactly, shape (tokens, k).
        """
        if self.team is None:
            if self.routers is not None:
                self.routers.follow(routes)
            attend_to: dict[str, Any] = {}
            if self.takes_segments:
                attend_to = prefix_sharing.inputs(shared)
                if position_ids is None:  # some models would count them in the mask
                    position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
            attend_to |= images
            return self._of_tokens(input_ids, position_ids, at, targets, temperature, outputs, copies, top, **attend_to)
        assert not images, "the config refuses them: no team splits a sequence with images"
        team = self.team
        before = input_ids.shape[1]
        input_ids, positions = team.padded(input_ids, position_ids)
        own = team.own(at.cpu(), before).to(at.device) if own is None else own
        attend: dict[str, Any] = {"team": team, "segments": shared}
        if self.routers is not None:
            if routes is not None:
                missing = input_ids.shape[1] - before
                routes = team.share(torch.nn.functional.pad(routes, (0, 0, 0, missing), value=OWN))
            self.routers.follow(routes)
        if copies is not None:
            copies = team.share(torch.nn.functional.pad(copies, (0, input_ids.shape[1] - before)))
        local = self._of_tokens(
            team.share(input_ids),
            team.share(positions),
            own.at,
            targets.index_select(0, own.tokens),
            temperature,
            outputs,
            copies,
            top if isinstance(top, int) else top.index_select(0, own.tokens),
            **attend,
        )
        router = {ROUTER_LOSS: local.pop(ROUTER_LOSS)} if copies is not None else {}
        return {name: team.whole(values, own, len(at)) for name, values in local.items()} | router

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
        inputs = {"input_ids": input_ids, "position_ids": position_ids, **attend}
        if self.head == "value":
            values = self.model(**inputs, use_cache=False).logits
            return {"values": values.flatten().index_select(0, at).float()}
        if self.router_loss is not None:
            inputs["output_router_logits"] = copies is not None
        computed = self.model.base_model(**inputs, use_cache=False)
        hidden = computed.last_hidden_state.flatten(0, 1).index_select(0, at)
        if self.head == "reward":
            return {"scores": self.model.score(hidden)[:, 0].float()}
        policy = self._of_policy(hidden, targets, temperature, outputs, top)
        if self.router_loss is None or copies is None:
            return policy
        summed = (lambda local: local) if self.team is None else self.team.summed
        return policy | {ROUTER_LOSS: self.router_loss(computed.router_logits, copies.flatten(), summed)}

    def _of_policy(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        outputs: tuple[str, ...],
        top: Tensor | int = 0,
    ) -> dict[str, Tensor]:
        has_top = not isinstance(top, int) or top > 0
        # Liger's kernel knows neither entropy nor temperature, and only a plain matrix
        is_plain = "entropy" not in outputs and not has_top and temperature == 1.0
        if self.kernels == "liger" and is_plain and self._has_plain_head():
            return {"log_probs": liger_log_probs(hidden, self.model.get_output_embeddings().weight, targets)}
        members = 1 if self.vocabulary is None else self.vocabulary.members
        limit = LOGITS_BYTES
        if not torch.is_grad_enabled():  # nothing is kept, so small pieces cost nothing
            limit = min(limit, 4 * _block_bytes(hidden))
        size = max(1, limit * members // (4 * self.model.config.get_text_config().vocab_size))
        count = -(-len(targets) // size)
        # sharded weights are gathered by a collective in each call
        if self.in_step:
            count = ranks.largest(count)
        if count <= 1:
            return self._piece(hidden, targets, top, temperature, outputs)
        pieces = [
            checkpoint(self._piece, *piece, temperature, outputs, use_reentrant=False)
            for piece in zip(
                torch.tensor_split(hidden, count),
                torch.tensor_split(targets, count),
                [top] * count if isinstance(top, int) else torch.tensor_split(top, count),
                strict=True,
            )
        ]
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    def _piece(
        self, hidden: Tensor, targets: Tensor, top: Tensor | int, temperature: float, outputs: tuple[str, ...]
    ) -> dict[str, Tensor]:
        compute = (
            compiled_log_probs() if self.kernels == "compile" and self.vocabulary is None else log_probs_and_entropy
        )
        logits = self._logits(hidden)
        optional = {}
        if "sum_pi_squared" in outputs:  # first: the gradient of the others overwrites the logits
            optional["sum_pi_squared"] = sum_pi_squared(logits.detach(), temperature, self.vocabulary)
        with_entropy = "entropy" in outputs
        if not isinstance(top, int) or top:
            assert self.vocabulary is None, "the config refuses it: this process has a part of the vocabulary"
            if isinstance(top, int):
                top = most_likely(logits.detach(), top)
                optional["topk_ids"] = top.float()
            log_probs, entropy, *of_top = log_probs_of_top(logits, targets, top, temperature, entropy=with_entropy)
            optional["topk_log_probs"], optional["tail_log_probs"] = of_top
        else:
            log_probs, entropy = compute(logits, targets, temperature, entropy=with_entropy, share=self.vocabulary)
        if entropy is not None:
            optional["entropy"] = entropy
        return {"log_probs": log_probs, **optional}

    def _has_plain_head(self) -> bool:
        """Returns True if this process has the whole head, and it is only a matrix."""
        head, config = self.model.get_output_embeddings(), self.model.config.get_text_config()
        changes = [getattr(config, key, None) for key in ("final_logit_softcapping", "logits_scaling", "logit_scale")]
        is_whole = self.vocabulary is None and not self.in_step
        return is_whole and type(head) is torch.nn.Linear and head.bias is None and changes == [None] * 3

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        config = self.model.config.get_text_config()
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (factor := getattr(config, "logit_scale", None)) is not None:
            logits = logits * factor
        return logits

    def use(self, kernels: Kernels) -> None:
        """Replaces kernels of the model in place; see `kernels`. Raises UserError if Liger does not support the
        model."""
        self.kernels = kernels
        if kernels == "compile":
            compile_layers(self.model)
        elif kernels == "liger":
            apply_liger(self.model)

    @torch.no_grad()
    def _check(self, packing: bool) -> None:
        """Checks on a few tokens that this architecture computes what the engine assumes."""
        name = type(self.model).__name__
        ids = torch.arange(4 * (self.team.size if self.team is not None else 1), device=self.model.device)[None]
        alone = self._hidden(ids)
        if self.head == "policy" and not agree(self._logits(alone), self.model(input_ids=ids, use_cache=False).logits):
            raise UserError(
                f"{name} changes the logits of its head in an unsupported way, so its log-probs would be wrong: "
                "choose a model of another architecture"
            )
        if self.head == "reward" and not hasattr(self.model, "score"):
            raise UserError(f"{name} does not score a conversation by its last token: choose a decoder")
        if packing:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            segments = Segments.of_sequences(np.full(2, ids.shape[1])).to(ids.device)
            apart = prefix_sharing.inputs(segments) if self.takes_segments and self.team is None else {}
            twice = self._hidden(ids.repeat(1, 2), position_ids=positions.repeat(1, 2), **apart)
            if not agree(twice[:, ids.shape[1] :], alone):
                raise UserError(f"{name} does not tell packed sequences apart: leave packing out")
        if self.team is not None:
            self.team.adopt(self.model)
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            share = [self.team.share(tensor) for tensor in (ids, positions)]
            hidden = self._hidden(share[0], position_ids=share[1], team=self.team, segments=None)
            if ranks.largest(int(not agree(hidden, self.team.share(alone)))):
                raise UserError(f"{name} does not attend over shares of a sequence: leave sequence_parallel out")

    def _hidden(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        return self.model.base_model(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state  # type: ignore[no-any-return]


def log_probs_and_entropy(
    logits: Float[Tensor, "tokens vocab"],
    targets: Int[Tensor, " tokens"],
    temperature: float,
    *,
    entropy: bool,
    share: VocabularyShare | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"] | None]:
    r"""Computes :math:`\log\pi(y) = z_y - lse(z)` and :math:`H = lse(z) - \sum_v \pi_v z_v` in float32.

    z are the temperature-scaled logits; lse is the log of the sum of exponentials. The backward pass overwrites the
    logits with their gradient.

    Args:
        share: this process's part of the vocabulary; None: all of it. With a part, all members of the team must make
            the same call, and compute the same loss from what it returns.

    Returns:
        Log-probs and entropy (or None) in nats, float32, shape (tokens,).
    """
    if share is not None:
        return _of_share(_scaled(logits, temperature), targets, share, entropy=entropy)
    if torch.compiler.is_compiling():  # fuses what the other writes in place
        log_probs, _, entropies = _of_block(_scaled(logits, temperature), targets, entropy=entropy)
        return log_probs, entropies
    log_probs, entropies, *_ = _LogProbs.apply(logits, targets, temperature, entropy, None)  # type: ignore[no-untyped-call]
    return log_probs, entropies


def log_probs_of_top(
    logits: Float[Tensor, "tokens vocab"],
    targets: Int[Tensor, " tokens"],
    ids: Int[Tensor, "tokens k"],
    temperature: float,
    *,
    entropy: bool,
) -> tuple[
    Float[Tensor, " tokens"], Float[Tensor, " tokens"] | None, Float[Tensor, "tokens k"], Float[Tensor, " tokens"]
]:
    """Computes log-probs and entropy as `log_probs_and_entropy` does, and the log-probs of other tokens.

    Args:
        ids: distinct tokens of a vocabulary, for each position. Those that these logits lack have log-prob `NO_MASS`.

    Returns:
        Log-probs of the targets, entropy (or None), log-probs of `ids`, and the log of the probability of all tokens
        that are not in `ids`, which is at least `NO_MASS`; in nats, float32.
    """
    return _LogProbs.apply(logits, targets, temperature, entropy, ids)  # type: ignore[no-any-return,no-untyped-call]


def most_likely(logits: Float[Tensor, "tokens vocab"], k: int) -> Int[Tensor, "tokens k"]:
    """Returns the k most likely tokens, in descending order."""
    ids = [logits[rows].topk(k).indices for rows in _blocks(logits)]
    return torch.cat(ids) if ids else logits.new_empty((0, k), dtype=torch.long)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.float() / temperature if temperature != 1.0 else logits.float()


def _of_block(scaled: Tensor, targets: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns log-probs, normalizers and entropy of scaled logits."""
    normalizers = scaled.logsumexp(-1)
    log_probs = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizers
    if not entropy:
        return log_probs, normalizers, None
    return log_probs, normalizers, normalizers - ((scaled - normalizers.unsqueeze(-1)).exp() * scaled).sum(-1)


class _LogProbs(torch.autograd.Function):
    """Log-probs and entropy; the gradient of the logits takes over their memory.

    With g and e, the gradients of a token's log-prob and entropy, that of its scaled logits is
    :math:`g (1_{v=y} - \\pi_v) - e \\pi_v (\\log\\pi_v + H)`. Given also :math:`g_i`, the gradients of the log-probs of
    tokens i, and r, that of the log of the probability :math:`\\rho` of all others, there is also
    :math:`-\\pi_v (r + \\sum_i g_i)`, plus :math:`g_v` for these tokens and :math:`r \\pi_v / \\rho` for the others.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, entropy: bool, ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        log_probs, normalizers, entropies = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3))
        known = top = tails = None
        if ids is not None:
            top, tails = torch.empty_like(ids, dtype=torch.float32), torch.empty_like(log_probs)
            known = ids < logits.shape[-1]
            # a token that these logits lack gets no gradient; the one with the smallest number, which they have, takes
            # its place in what is read
            ids = torch.where(known, ids, ids.amin(-1, keepdim=True)).clamp(max=logits.shape[-1] - 1)
        for rows in _blocks(logits):
            scaled = _scaled(logits[rows], temperature)
            log_probs[rows], normalizers[rows], of_rows = _of_block(scaled, targets[rows], entropy=entropy)
            if of_rows is not None:
                entropies[rows] = of_rows
            if ids is not None and top is not None and tails is not None and known is not None:
                of_top = scaled.gather(-1, ids[rows]) - normalizers[rows, None]
                top[rows] = of_top.masked_fill(~known[rows], NO_MASS)
                rest = scaled.scatter(-1, ids[rows], -torch.inf).logsumexp(-1)
                tails[rows] = (rest - normalizers[rows]).clamp(min=NO_MASS)
        ctx.save_for_backward(logits, targets, normalizers, entropies if entropy else None, ids, known, tails)
        ctx.temperature = temperature
        return log_probs, entropies if entropy else None, top, tails

    @staticmethod
    def backward(
        ctx: Any,
        of_log_probs: Tensor,
        of_entropies: Tensor | None,
        of_top: Tensor | None,
        of_tails: Tensor | None,
    ) -> tuple[Tensor, None, None, None, None]:
        logits, targets, normalizers, entropies, ids, known, tails = ctx.saved_tensors
        for rows in _blocks(logits):
            log_pi = _scaled(logits[rows], ctx.temperature) - normalizers[rows, None]
            others: Tensor | None = None
            if ids is not None:
                assert of_top is not None and of_tails is not None
                others = _gradient_of_top(log_pi, ids[rows], of_top[rows] * known[rows], tails[rows], of_tails[rows])
            weights = of_log_probs[rows, None]
            if entropies is None:
                gradients = log_pi.exp_().mul_(-weights)
            else:
                assert of_entropies is not None
                pi = log_pi.exp()
                gradients = log_pi.add_(entropies[rows, None]).mul_(of_entropies[rows, None]).add_(weights)
                gradients.mul_(pi).neg_()
            gradients.scatter_add_(-1, targets[rows, None], weights)
            if others is not None:
                gradients.add_(others)
            logits[rows] = gradients.div_(ctx.temperature) if ctx.temperature != 1.0 else gradients
        return logits, None, None, None, None


def _gradient_of_top(log_pi: Tensor, ids: Tensor, of_top: Tensor, tails: Tensor, of_tails: Tensor) -> Tensor:
    """Returns the gradient of scaled logits, given those of the log-probs of `ids` and of the rest; see `_LogProbs`."""
    of_tails = of_tails.where(tails > NO_MASS, 0.0)  # there is no rest
    in_rest = (log_pi - tails[:, None]).exp_().scatter_(-1, ids, 0.0).mul_(of_tails[:, None])
    total = (of_top.sum(-1) + of_tails)[:, None]
    return in_rest.addcmul_(log_pi.exp(), total, value=-1.0).scatter_add_(-1, ids, of_top)


def _block_bytes(on: Tensor) -> int:
    return BLOCK_BYTES[accelerator.kind(on.device)]


def _blocks(logits: Tensor) -> list[slice]:
    """Splits the tokens of logits so that the temporary tensors are small."""
    size = max(1, _block_bytes(logits) // (4 * logits.shape[-1]))
    return [slice(start, start + size) for start in range(0, len(logits), size)]


def _of_share(
    scaled: Tensor, targets: Tensor, share: VocabularyShare, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Computes log-probs and entropy of scaled logits, of which each member of a team has a part."""
    # subtracted to avoid overflow; it cancels out, so it needs no gradient
    largest = scaled.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=share.group)
    exponentials = (scaled - largest.unsqueeze(-1)).exp()
    local = targets - share.first
    is_mine = (local >= 0) & (local < scaled.shape[-1])
    of_targets = scaled.gather(-1, torch.where(is_mine, local, 0).unsqueeze(-1)).squeeze(-1)
    terms = [exponentials.sum(-1), torch.where(is_mine, of_targets, 0.0)]
    if entropy:
        terms.append((exponentials * scaled).sum(-1))
    total, of_targets, *weighted = _SumOverTeam.apply(torch.stack(terms), share.group).unbind()  # type: ignore[no-untyped-call]
    normalizer = largest + total.log()
    return of_targets - normalizer, normalizer - weighted[0] / total if entropy else None


def sum_pi_squared(
    logits: Float[Tensor, "tokens vocab"], temperature: float, share: VocabularyShare | None = None
) -> Float[Tensor, " tokens"]:
    r"""Computes :math:`\sum_v \pi_v^2` in float32, without gradient; see `log_probs_and_entropy`."""
    sums = logits.new_empty((2, len(logits)), dtype=torch.float32)
    # the members of a team call equally often, whatever their parts are
    for rows in _blocks(logits) if share is None else [slice(None)]:
        scaled = _scaled(logits[rows], temperature)
        largest = scaled.amax(-1)
        if share is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=share.group)
        exponentials = (scaled - largest.unsqueeze(-1)).exp()
        sums[0, rows], sums[1, rows] = exponentials.sum(-1), exponentials.square().sum(-1)
    if share is not None:
        dist.all_reduce(sums, group=share.group)
    return sums[1] / sums[0].square()


@cache
def compiled_log_probs() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Returns `log_probs_and_entropy`, which is compiled on its first call."""
    return compiled(log_probs_and_entropy)


class _SumOverTeam(torch.autograd.Function):
    """Sums over a team whose members all compute the same loss, so that each has the sum's whole gradient."""

    @staticmethod
    def forward(ctx: Any, terms: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = terms.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
