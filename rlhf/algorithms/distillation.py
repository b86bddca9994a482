"""On-policy distillation: a teacher's opinion of the tokens that the policy drew or could have drawn."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from jaxtyping import Float, Int
from pydantic import Field

from ratchet.rlhf.algorithms.base import Algorithm
from ratchet.rlhf.algorithms.tensor import Tensor

Tokens = Float[Tensor, "batch response"]
TopTokens = Float[Tensor, "batch response k"]
Buckets = Float[Tensor, "*shape"]
Spans = Int[Tensor, "batch response"]
Divergence = Literal["sampled", "forward_kl", "reverse_kl", "jsd"]


class Distillation(Algorithm):
    r"""On-policy distillation (arXiv 2306.13649): each token moves the policy toward a teacher.

    By default, `divergence: sampled`, the advantage of each token does:

    .. math::
        A_t \mathrel{+}= c\,(d_t - \operatorname{mean}(d)), \qquad
        d_t = \log\pi_T(y_t \mid x, y_{<t}) - \log\pi(y_t \mid x, y_{<t})

    With tokens drawn from :math:`\pi`, the mean of d is minus the reverse KL divergence of the policy from the teacher,
    and the policy gradient with it is the gradient of that divergence, token by token (a discount of 0): the on-policy
    case of GKD with the reverse KL, estimated by the drawn token instead of the sum over the vocabulary. The mean over
    the batch is a baseline: it changes the gradient's variance and not its expectation.

    A teacher with a vocabulary of its own (`teacher.align: text`) is compared over spans of text that both tokenizers
    begin and end at the same characters: :math:`d_t` is then the log-prob of the span from the teacher less that from
    the policy, and the same for all tokens of the span. Each is the sum over the tokens in which its tokenizer spells
    the span; other spellings of the same text are left out.

    The other divergences are a term of the loss, :math:`c\,D_t`, aggregated as the policy loss is, with a gradient for
    all tokens that could have been drawn. With :math:`\pi_T` and :math:`\pi` at each position,

    .. math::
        D_{forward\_kl} &= \mathrm{KL}(\pi_T \| \pi) = \sum_v \pi_T(v) \log\frac{\pi_T(v)}{\pi(v)} \\
        D_{reverse\_kl} &= \mathrm{KL}(\pi \| \pi_T) \\
        D_{jsd} &= \beta\,\mathrm{KL}(\pi_T \| m) + (1 - \beta)\,\mathrm{KL}(\pi \| m), \qquad
        m = \beta \pi_T + (1 - \beta) \pi

    as in GKD (arXiv 2306.13649), whose limits for :math:`\beta` are the KL divergences: forward at 0, reverse at 1.
    The sums run over the teacher's `teacher.top_k` most likely tokens and one bucket for all others. So they are at
    most those over the vocabulary, and equal if policy and teacher agree on the proportions of the others. How the
    policy came to the tokens before is not differentiated, as in GKD.
    """

    divergence: Divergence = Field(
        "sampled",
        description="sampled (log-probs of the drawn tokens, as advantages), or a loss over teacher.top_k tokens: "
        "forward_kl, reverse_kl or jsd",
    )
    coef: float = Field(1.0, gt=0, description="weight of the teacher beside the advantages of the reward")
    beta: float = Field(0.5, gt=0, lt=1, description="share of the teacher in the mixture of jsd (TRL's beta)")
    clamp: float | None = Field(
        None, gt=0, description="largest size of d, or of a token's divergence, that counts (verl's loss_max_clamp)"
    )
    needs: ClassVar[tuple[str, ...]] = ("old_log_probs", "teacher_log_probs")

    def __call__(
        self, log_probs: Tokens, teacher_log_probs: Tokens, mask: Tokens, spans: Spans | None = None
    ) -> Tokens:
        """Computes the numbers to add to the advantages.

        Args:
            log_probs: those of the policy that drew the tokens, shape (batch, response).
            teacher_log_probs: those of the teacher, shape (batch, response).
            mask: 1 for the tokens that count, shape (batch, response).
            spans: numbers of the spans of text whose differences count, shape (batch, response); None: each token is a
                span.

        Returns:
            The numbers, shape (batch, response).
        """
        difference = (teacher_log_probs - log_probs).where(mask > 0, 0.0)
        if spans is not None:  # a span is drawn as a whole, so each of its tokens moves by the difference of the span
            difference = difference.new_zeros(difference.shape).scatter_add(1, spans, difference).gather(1, spans)
            difference = difference.where(mask > 0, 0.0)
        if self.clamp is not None:
            difference = difference.clamp(-self.clamp, self.clamp)
        return self.coef * (difference - difference.sum() / mask.sum().clamp(min=1)) * mask

    @property
    def in_loss(self) -> bool:
        """True if the teacher is a term of the loss, and not of the advantages."""
        return self.divergence != "sampled"

    def of_tokens(self, top: TopTokens, tail: Tokens, teacher_top: TopTokens, teacher_tail: Tokens) -> Tokens:
        """Computes the divergence at each token; see the class.

        Args:
            top: log-probs of the teacher's most likely tokens under the policy, shape (batch, response, k).
            tail: log of the probability that the policy gives to all others, shape (batch, response).
            teacher_top: log-probs of the same tokens under the teacher, shape (batch, response, k).
            teacher_tail: log of the probability that the teacher gives to all others, shape (batch, response).
        """
        assert self.in_loss, "the teacher's opinion of drawn tokens is an advantage"
        divergence = self._terms(top, teacher_top).sum(-1) + self._terms(tail, teacher_tail)
        return divergence if self.clamp is None else divergence.clamp(max=self.clamp)

    def _terms(self, student: Buckets, teacher: Buckets) -> Buckets:
        """Computes the terms of the divergence, one for each log-prob."""
        if self.divergence == "forward_kl":
            return teacher.exp() * (teacher - student)
        if self.divergence == "reverse_kl":
            return student.exp() * (student - teacher)
        mixture = (teacher + math.log(self.beta)).logaddexp(student + math.log1p(-self.beta))
        of_teacher, of_student = teacher.exp() * (teacher - mixture), student.exp() * (student - mixture)
        return self.beta * of_teacher + (1 - self.beta) * of_student
