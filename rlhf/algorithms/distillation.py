"""On-policy distillation: a teacher's opinion of the tokens that the policy drew."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from pydantic import Field

from ratchet.rlhf.algorithms.base import Algorithm
from ratchet.rlhf.algorithms.tensor import Tensor

Tokens = Float[Tensor, "batch response"]


class Distillation(Algorithm):
    r"""On-policy distillation (arXiv 2306.13649): each token's advantage moves the policy toward a teacher.

    .. math::
        A_t \mathrel{+}= c\,(d_t - \operatorname{mean}(d)), \qquad
        d_t = \log\pi_T(y_t \mid x, y_{<t}) - \log\pi(y_t \mid x, y_{<t})

    With tokens drawn from :math:`\pi`, the mean of d is minus the reverse KL divergence of the policy from the teacher,
    and the policy gradient with it is the gradient of that divergence, token by token (a discount of 0): the on-policy
    case of GKD with the reverse KL, estimated by the drawn token instead of the sum over the vocabulary. The mean over
    the batch is a baseline: it changes the gradient's variance and not its expectation.
    """

    coef: float = Field(1.0, gt=0, description="weight of the teacher beside the advantages of the reward")
    clamp: float | None = Field(None, gt=0, description="largest size of d that counts (verl's loss_max_clamp)")
    needs: ClassVar[tuple[str, ...]] = ("old_log_probs", "teacher_log_probs")

    def __call__(self, log_probs: Tokens, teacher_log_probs: Tokens, mask: Tokens) -> Tokens:
        """Computes the numbers to add to the advantages. `log_probs` are those of the policy that drew the tokens."""
        difference = (teacher_log_probs - log_probs).where(mask > 0, 0.0)
        if self.clamp is not None:
            difference = difference.clamp(-self.clamp, self.clamp)
        return self.coef * (difference - difference.sum() / mask.sum().clamp(min=1)) * mask
