"""Off-policy learning from experts' answers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from jaxtyping import Float
from pydantic import Field

from ratchet.rlhf.algorithms.base import Algorithm
from ratchet.rlhf.algorithms.tensor import Tensor

Tokens = Float[Tensor, "batch response"]


class LUFFY(Algorithm):
    r"""Mixed-policy optimization (LUFFY, arXiv 2504.14945): an expert's answers are compared with those of the policy,
    by the reward, in one group.

    The expert's distribution is unknown. Its probability of each token is taken as 1, so that the importance ratio is
    :math:`\pi`, and is shaped by :math:`f(x) = x / (x + \gamma)`. The weight of a token's policy gradient is then

    .. math:: w_t = f'(\pi_t)\,\pi_t = \frac{\gamma\,\pi_t}{(\pi_t + \gamma)^2}, \qquad
        \pi_t = \pi_{old}(y_t \mid x, y_{<t})

    and without shaping :math:`w_t = \pi_t`. The weight is computed once per iteration: at the first optimizer step the
    gradient is LUFFY's, and later the policy loss bounds how far the policy moves.
    """

    type: Literal["luffy"] = "luffy"
    gamma: float | None = Field(
        0.1, gt=0, description="shapes the ratio, so that improbable tokens count more; null: no shaping"
    )
    needs: ClassVar[tuple[str, ...]] = ("old_log_probs",)
    compares: ClassVar[bool] = True
    """True: an expert's answers belong to the group of their prompt."""

    def weights(self, old_log_probs: Tokens, mask: Tokens) -> Tokens:
        """Computes the weights of an expert's tokens in the policy loss, from their log-probs before the update."""
        probs = old_log_probs.where(mask > 0, 0.0).exp()
        return mask * (probs if self.gamma is None else self.gamma * probs / (probs + self.gamma).square())


class SupervisedExperts(Algorithm):
    r"""Supervised fine-tuning beside reinforcement learning (CHORD, arXiv 2508.11408): the loss of an expert's token is
    :math:`-c \log\pi(y_t \mid x, y_{<t})`, whatever its reward is.

    In the policy loss, its advantage is 1 and its weight is c: at the first optimizer step of an iteration the gradient
    is that of supervised fine-tuning, and later the policy loss bounds how far the policy moves. The policy's own
    answers are compared with each other only.
    """

    type: Literal["sft"] = "sft"
    coef: float = Field(0.1, gt=0, description="weight of the supervised loss beside the policy loss")
    needs: ClassVar[tuple[str, ...]] = ("old_log_probs",)
    compares: ClassVar[bool] = False
    """False: an expert's answers do not belong to the group of their prompt."""

    def weights(self, old_log_probs: Tokens, mask: Tokens) -> Tokens:
        """Returns `coef` for each token, 0 where masked."""
        return mask * self.coef


Experts = Annotated[LUFFY | SupervisedExperts, Field(discriminator="type")]
