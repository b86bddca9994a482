"""Servers that score given tokens: a teacher behind `vllm serve`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ratchet.rlhf import event_loop
from ratchet.rlhf.errors import EngineLost, UserError
from ratchet.rlhf.rollout.server_engine import Float32, TopTokens, VLLMApi
from ratchet.rlhf.rollout.server_requests import Ask, Servers

NO_MASS = -100.0
"""Log-prob of no token at all, as the engines write it."""
ROUNDING = 1e-6
"""Error of a sum of probabilities that a server gives as float32 log-probs."""


class ScoringServers:
    """Servers of one model that score given tokens."""

    def __init__(self, urls: Sequence[str], *, timeout_s: float) -> None:
        """Takes the servers' base URLs, and the seconds without an answer after which another one is asked; sends no
        request yet."""
        self._api = VLLMApi()
        self._servers = Servers(urls, timeout_s)

    def top_tokens(self, texts: Sequence[Sequence[int]], starts: Sequence[int], top_k: int) -> list[TopTokens]:
        """Scores texts, all at the same time.

        Args:
            starts: for each text, the number of its first token that is scored, at least 1.
            top_k: number of most likely tokens.

        Raises:
            EngineLost: no server answers.
            UserError: a server refuses a text.
        """

        async def scored(text: Sequence[int], start: int) -> TopTokens:
            return await self._servers.any(lambda ask: self._api.top_tokens_of(ask, text, start, top_k))

        async def all_texts() -> list[TopTokens]:
            return await event_loop.gather([scored(*one) for one in zip(texts, starts, strict=True)])

        return event_loop.run(all_texts())

    def check(self, longest: int, top_k: int) -> dict[str, str]:
        """Asks every server for what it will be asked.

        Args:
            longest: number of tokens of the longest text.
            top_k: number of most likely tokens.

        Returns:
            What each server calls the model's files, by URL.

        Raises:
            UserError: a server does not answer, or does not score such texts; names the fix.
        """

        async def checked(ask: Ask) -> str:
            card = await self._api.card(ask)
            room = card.get("max_model_len")
            if room is not None and int(room) < longest + 1:  # it draws one token after the text
                raise UserError(
                    f"{ask.url} reads at most {room} tokens, and a longest prompt with its longest response and one "
                    f"token more are {longest + 1}: start it with --max-model-len {longest + 1}"
                )
            try:
                found = await self._api.top_tokens_of(ask, [0, 0], 1, top_k)
            except UserError as error:
                if "max allowed" not in str(error):
                    raise
                raise UserError(
                    f"{ask.url} does not give the log-probs of {top_k} tokens: start it with --max-logprobs {top_k}, "
                    "or lower teacher.top_k"
                ) from None
            if (found.log_probs > 0).any():
                raise UserError(f"{ask.url} gives logits: start it without --logprobs-mode, which is then raw_logprobs")
            return str(card.get("root") or card["id"])

        try:
            return self._servers.each(checked)
        except EngineLost as error:
            raise UserError(f"{error}: start `vllm serve` there, or change urls") from None

    def close(self) -> None:
        """Closes the connections; the servers keep running."""
        self._servers.close()


def tail_of(found: TopTokens, text: Sequence[int], vocabulary: int) -> Float32:
    """Computes the log of the probability of all but the most likely tokens.

    A server gives no more than log-probs in float32, so a rest below their rounding is not known: it counts as the
    rounding, unless so much cannot be left.

    Args:
        found: the most likely tokens, of which there are some.
        text: the tokens of the text at the same places.
        vocabulary: number of tokens that there are.

    Returns:
        The logs, shape (tokens,), at least `NO_MASS`.
    """
    top = np.exp(found.top_log_probs.astype(np.float64))
    rest = np.maximum(1 - top.sum(-1), ROUNDING)
    others = vocabulary - top.shape[1]
    rest = np.minimum(rest, others * top[:, -1])  # none of the others is more likely than the last of these
    is_other = (found.ids != np.asarray(text)[:, None]).all(-1)
    rest = np.maximum(rest, np.where(is_other, np.exp(found.log_probs.astype(np.float64)), 0.0))
    with np.errstate(divide="ignore"):
        logs: Float32 = np.maximum(np.log(rest), NO_MASS).astype(np.float32)
    return logs
