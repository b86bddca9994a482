"""Checks that a policy loss or an advantage estimator computes what the trainer assumes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from ratchet.rlhf.algorithms.advantages import AdvantageEstimator
from ratchet.rlhf.algorithms.masked import LossNormalizers
from ratchet.rlhf.algorithms.policy_losses import PolicyLossBase, SelectingLoss
from ratchet.rlhf.errors import UserError, in_one_line

Batch = dict[str, torch.Tensor]

COLUMNS = (
    "log_probs",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "rollout_is_weights",
    "selection_noise",
    "entropy",
    "sum_pi_squared",
    "advantages",
    "returns",
    "values",
    "turn_values",
    "token_rewards",
)
LOSS_NEEDS = ("old_log_probs", "selection_noise")
ADVANTAGE_NEEDS = (
    "values",
    "group_ids",
    "entropy",
    "greedy_scores",
    "turn_values",
    "old_log_probs",
    "sum_pi_squared",
    "reward_parts",
    "turns",
    "states",
)
RESERVED = {"pg_loss", "entropy_loss", "kl_loss"}
"""Metrics of the objective around the loss."""
GARBAGE = (0.0, -3.5, 1e30, -1e30)
"""Values at masked positions, where no algorithm should look."""
TOLERANCE = 1e-9
"""Relative and absolute. Sums in another order differ by some 1e-13 in float64."""


def check_loss(loss: PolicyLossBase, examples: int = 50) -> None:
    """Checks a policy loss on random mini-batches.

    The loss and its gradient are finite, also where log-ratios are extreme. Masked positions and padding have no
    influence, nor have old log-probs that the loss does not need. Rows may come in any order, and the losses of
    micro-batches add up to the loss of the mini-batch.

    Args:
        loss: an instance of the class.
        examples: number of mini-batches, the same ones in each call.

    Raises:
        UserError: the first thing that does not hold, and how to fix it.
    """
    _require_known(loss.needs, LOSS_NEEDS)
    for batch, rng in _batches(examples):
        mask = batch["mask"]
        result: object = loss.token_losses(batch["log_probs"], batch["old_log_probs"], batch["advantages"], mask)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
            raise UserError("token_losses should return the losses and a dict of metrics, which may be empty")
        token_losses, metrics = result
        if taken := sorted(RESERVED & metrics.keys()):
            raise UserError(f"the metric {taken[0]} is the trainer's own: rename it")
        for name, tensor in (("loss", token_losses), *metrics.items()):
            _require_shape(f"token_losses returned the {name}", tensor, mask.shape)
        chosen = _selected(loss, batch)
        whole = _loss_and_gradient(loss, chosen, mask)
        if not all(tensor.isfinite().all() for tensor in whole):
            raise UserError(
                "the loss or its gradient is not finite where log-ratios or advantages are large: clamp the log-ratio "
                "before exp (built-in losses: to ± 20)"
            )
        if whole[1][mask == 0].any():
            raise UserError("masked tokens get a gradient: multiply by the mask, or leave the reduction to aggregate")
        garbage = _loss_and_gradient(loss, spoiled(chosen, rng.choice(GARBAGE)), mask)
        _require_same(
            "values at masked tokens change the loss: multiply by the mask before sums and means", garbage, whole
        )
        value, gradient = _loss_and_gradient(loss, padded(chosen, 2), mask)
        _require_same(
            "padding changes the loss: count tokens by the mask, not by the shape",
            (value, gradient[:, : mask.shape[1]]),
            whole,
        )
        if "old_log_probs" not in loss.needs:
            other = _loss_and_gradient(loss, chosen | {"old_log_probs": chosen["old_log_probs"] + 1}, mask)
            _require_same(
                "old_log_probs change the loss, but are not among its needs, so none would be computed: add them",
                other,
                whole,
            )
        order = rng.permutation(len(mask))
        split = rng.integers(0, len(mask) + 1)
        pieces = [_loss_and_gradient(loss, rows(chosen, piece), mask) for piece in (order[:split], order[split:])]
        total = pieces[0][0] + pieces[1][0], torch.cat([pieces[0][1], pieces[1][1]])
        _require_same(
            "the losses of micro-batches do not add up to that of the mini-batch: a token's loss may not depend on "
            "other trajectories (a SelectingLoss compares them in select)",
            total,
            (whole[0], whole[1][order]),
        )


def check_advantage(estimator: AdvantageEstimator, examples: int = 50) -> None:
    """Checks an advantage estimator on random batches.

    Advantages and returns are finite, and 0 at masked positions. Masked positions, padding and the order of the
    trajectories have no influence.

    Args:
        estimator: an instance of the class.
        examples: number of batches, the same ones in each call.

    Raises:
        UserError: the first thing that does not hold, and how to fix it.
    """

    def estimate(batch: Batch) -> torch.Tensor:
        inputs = batch | {"reward_parts": {"part": batch["part"]}}
        results = estimator(batch["token_rewards"], batch["mask"], **{name: inputs[name] for name in estimator.needs})
        if not isinstance(results, tuple) or len(results) not in (2, 3):
            raise UserError("the estimator should return two tensors, advantages and returns, and perhaps metrics")
        estimates, metrics = results[:2], results[2:]
        for name, result in zip(("advantages", "returns"), estimates, strict=True):
            _require_shape(f"the estimator returned {name}", result, batch["mask"].shape)
        if metrics and not _are_numbers(metrics[0]):
            raise UserError(
                f"the estimator returned the metrics {in_one_line(repr(metrics[0])):.60}: return a dict of numbers by "
                "their names"
            )
        return torch.stack(estimates)

    _require_known(estimator.needs, ADVANTAGE_NEEDS)
    for batch, rng in _batches(examples):
        mask = batch["mask"]
        estimates = estimate(batch)
        if not estimates.isfinite().all():
            raise UserError("advantages or returns are not finite: guard divisions, for example by an epsilon")
        if estimates[:, mask == 0].any():
            raise UserError("masked tokens get an advantage: multiply by the mask, or return self.finished(…)")
        garbage = estimate(spoiled(batch, rng.choice(GARBAGE)))
        _require_same("values at masked tokens change the advantages: multiply by the mask", (garbage,), (estimates,))
        wider = estimate(padded(batch, 2))[..., : mask.shape[1]]
        _require_same("padding changes the advantages: count by the mask, not by the shape", (wider,), (estimates,))
        order = rng.permutation(len(mask))
        _require_same(
            "the order of the trajectories changes the advantages: compare by group_ids",
            (estimate(rows(batch, order)),),
            (estimates[:, order],),
        )


def random_batch(rng: np.random.Generator, lengths: list[int], extra: int, scale: float) -> Batch:
    """Draws a mini-batch in which some tokens are masked.

    Args:
        lengths: tokens of each trajectory.
        extra: columns of padding beyond the longest trajectory.
        scale: standard deviation of all values.

    Returns:
        Every input that a loss or an estimator may need, float64 or int64, by name.
    """
    shape = (len(lengths), max(1, *lengths) + extra)
    mask = (np.arange(shape[1]) < np.array(lengths)[:, None]) & (rng.random(shape) < 0.8)
    batch = {name: torch.from_numpy(rng.standard_normal(shape) * scale) for name in COLUMNS}
    batch["rollout_is_weights"] = batch["rollout_is_weights"].abs()
    batch["mask"] = torch.from_numpy(mask.astype(np.float64))
    batch["group_ids"] = torch.from_numpy(rng.integers(0, 3, shape[0]))
    batch |= {name: torch.from_numpy(rng.standard_normal(shape[0]) * scale) for name in ("greedy_scores", "part")}
    batch["turns"] = torch.from_numpy(np.cumsum(rng.random(shape) < 0.4, axis=1))
    said = rng.integers(0, 3, (shape[0], shape[1] + 1))
    batch["states"] = torch.from_numpy(np.take_along_axis(said, batch["turns"].numpy(), axis=1))
    return batch


def spoiled(batch: Batch, garbage: float) -> Batch:
    """Returns the same batch with other values at its masked positions."""
    mask = batch["mask"] > 0
    return {
        name: x.where(mask, garbage if x.is_floating_point() else int(garbage) % 1000) if x.dim() == 2 else x
        for name, x in batch.items()
        if name != "mask"
    } | {"mask": batch["mask"]}


def padded(batch: Batch, columns: int) -> Batch:
    """Returns the same batch, padded further to the right."""
    return {name: torch.nn.functional.pad(x, (0, columns)) if x.dim() == 2 else x for name, x in batch.items()}


def rows(batch: Batch, which: object) -> Batch:
    return {name: x[which] for name, x in batch.items()}  # type: ignore[index]


def _batches(examples: int) -> Iterator[tuple[Batch, np.random.Generator]]:
    rng = np.random.default_rng(0)
    for number in range(examples):
        lengths = [int(length) for length in rng.integers(0, 7, rng.integers(1, 7))]
        scale = (0.1, 1.0, 30.0)[number % 3]
        yield spoiled(random_batch(rng, lengths, int(rng.integers(0, 3)), scale), rng.choice(GARBAGE)), rng


def _selected(loss: PolicyLossBase, batch: Batch) -> Batch:
    if not isinstance(loss, SelectingLoss):
        return batch
    names = ("log_probs", "old_log_probs", "advantages", "mask", "selection_noise")
    return batch | {"selected": loss.select(*(batch[name] for name in names)).double()}


def _loss_and_gradient(
    loss: PolicyLossBase, batch: Batch, whole_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the contribution of a micro-batch to the loss of the mini-batch with the mask `whole_mask`."""
    log_probs = batch["log_probs"].clone().requires_grad_()
    options = {"selected": batch["selected"] > 0} if "selected" in batch else {}
    value, _ = loss(
        log_probs, batch["old_log_probs"], batch["advantages"], batch["mask"], LossNormalizers.of(whole_mask), **options
    )
    if value.shape:
        raise UserError(f"the loss has the shape {tuple(value.shape)}: reduce it to a scalar")
    if not value.requires_grad:
        raise UserError("the loss does not depend on log_probs: it has no gradient")
    (gradient,) = torch.autograd.grad(value, log_probs)
    return value.detach(), gradient


def _are_numbers(metrics: object) -> bool:
    """True for a dict of numbers, or tensors with one number, by name."""
    return isinstance(metrics, Mapping) and all(
        isinstance(name, str)
        and (isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1))
        for name, value in metrics.items()
    )


def _require_known(needs: object, known: tuple[str, ...]) -> None:
    if not isinstance(needs, tuple | list):
        raise UserError(f"needs is {needs!r}: make it a tuple of names, such as ({known[0]!r},)")
    if unknown := [name for name in needs if name not in known]:
        raise UserError(f"needs names {unknown[0]}, which it cannot be given: choose among {', '.join(known)}")


def _require_shape(what: str, tensor: object, shape: torch.Size) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.shape != shape:
        given = f"of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"as {type(tensor).__name__}"
        raise UserError(f"{what} {given}: it should be a tensor of shape {tuple(shape)}, (batch, response)")


def _require_same(problem: str, results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    # compared with the largest value, because a sum's rounding is relative to its terms
    for result, value in zip(results, expected, strict=True):
        scale = max(1.0, float(value.abs().max())) if value.numel() else 1.0
        if not torch.allclose(result, value, rtol=TOLERANCE, atol=TOLERANCE * scale):
            raise UserError(problem)
