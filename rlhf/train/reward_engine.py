"""Reward models: Hugging Face classifiers that score the last message of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ratchet.rlhf.data.chat_turns import Rendered, Tokens, token_ids, tokens
from ratchet.rlhf.data.formats import Chat
from ratchet.rlhf.data.prompts import beginning, with_response
from ratchet.rlhf.distributed import accelerator, ranks
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.train.micro_batches import deal

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """A step of a response, and its score."""

    end: int
    """Start of the next step, in characters of the response."""
    score: float


class RewardEngine:
    """A reward model; each rank gets all conversations, scores a share, and returns all scores.

    The score is the logit of a classifier with one label, or the probability of the last of several labels.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Moves a model to this rank's device.

        Args:
            model: a sequence classifier (`scores`) or a token classifier (`steps`).
        """
        from ratchet.rlhf.distributed.host_buffers import HostBuffers

        self.model = model.to(accelerator.device())
        self._buffers = HostBuffers(accelerator.device())
        self.tokenizer = tokenizer
        self.padding = model.config.get_text_config().pad_token_id

    def scores(self, conversations: Sequence[tuple[Chat, str]], *, micro_batch_tokens: int) -> list[float]:
        """Scores responses with a sequence classifier; `conversations` are pairs of prompt and response."""
        ids = [self._tokens(with_response(chat, response, self.tokenizer)[0]).ids for chat, response in conversations]
        scores: dict[int, float] = {}
        for rows, logits in self._logits(ids, micro_batch_tokens):
            scores |= dict(zip(rows.tolist(), self._read(logits), strict=True))
        return self._from_all(scores, len(ids))

    def steps(
        self, conversations: Sequence[tuple[Chat, str]], separator: str, *, micro_batch_tokens: int
    ) -> list[list[Step]]:
        """Scores the steps of responses, ended by `separator`, with a token classifier at their last tokens.

        Raises:
            UserError: a conversation is too long for the model, the tokenizer does not report character offsets, or
                the chat template changes a response.
        """
        if not self.tokenizer.is_fast:
            raise UserError("the reward model's tokenizer does not report character offsets: use a fast tokenizer")
        ids, ends, places = [], [], []
        for chat, response in conversations:
            written, start = with_response(chat, response, self.tokenizer)
            if start is None:
                raise UserError(
                    "the reward model's chat template changes a response, so its steps cannot be located: "
                    f"{written.text!r}"
                )
            # templates may strip the end of a response
            kept = len(response.rstrip()) if self.tokenizer.chat_template else len(response)
            ends.append(step_ends(response, separator))
            ends_in_text = [start + min(end, kept) for end in ends[-1]]
            read = self._tokens(written)
            ids.append(read.ids)
            # offsets must not decrease, but a special token at the end may have offset 0
            begins = np.maximum.accumulate([begin for begin, _ in read.spans])
            places.append(np.searchsorted(begins, ends_in_text) - 1)
        steps: dict[int, list[Step]] = {}
        for rows, logits in self._logits(ids, micro_batch_tokens):
            for row, token_logits in zip(rows.tolist(), logits, strict=True):
                scores = self._read(token_logits[places[row]])
                steps[row] = [Step(end, score) for end, score in zip(ends[row], scores, strict=True)]
        return self._from_all(steps, len(ids))

    def place(self, *, model: bool, optimizer: bool) -> None:
        """Moves the model to the device or to host memory; `optimizer` is ignored."""
        from ratchet.rlhf.distributed.host_buffers import release_memory

        if model:
            self._buffers.give_back()
        elif self._buffers.take((*self.model.parameters(), *self.model.buffers())):
            release_memory(self.model.device)

    def _tokens(self, written: Rendered) -> Tokens:
        """Tokenizes a conversation."""
        if self.tokenizer.is_fast:
            ids, spans = tokens(written, self.tokenizer)
        else:
            ids, spans = token_ids(written, self.tokenizer), []
        # a chat template writes special tokens itself
        before = [] if self.tokenizer.chat_template else beginning(ids, self.tokenizer)
        ids = [*before, *ids]
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None and len(ids) > longest:
            raise UserError(
                f"the reward model reads at most {longest} tokens, but a conversation has {len(ids)} "
                f"({written.text[:60]!r}...): choose another model, or fork with a lower rollout.max_response_tokens"
            )
        return Tokens(ids, [*[(0, 0)] * len(before), *spans])

    def _logits(self, ids: list[list[int]], budget: int) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Yields rows and logits of each piece of this rank's share, float32, on the CPU."""
        import torch

        lengths = np.array([len(row) for row in ids])
        for rows in deal(lengths, budget, ranks.count())[ranks.rank()]:
            if not len(rows):
                continue
            input_ids = torch.full((len(rows), int(lengths[rows].max())), self._padding(ids, rows))
            mask = torch.zeros_like(input_ids)
            for at, row in enumerate(rows):
                input_ids[at, : lengths[row]] = torch.tensor(ids[row])
                mask[at, : lengths[row]] = 1
            with torch.inference_mode():
                yield (
                    rows,
                    self.model(input_ids=input_ids.to(self.model.device), attention_mask=mask.to(self.model.device))
                    .logits.float()
                    .cpu(),
                )

    def _padding(self, ids: list[list[int]], rows: np.ndarray) -> int:
        """Returns the padding token for a piece."""
        if self.padding is not None:
            return int(self.padding)
        # a decoder scores the last token that is not padding; a token that occurs nowhere lets several be scored at
        # once
        used = {token for row in rows for token in ids[row]}
        config = self.model.config.get_text_config()
        config.pad_token_id = next(token for token in range(config.vocab_size) if token not in used)
        return int(config.pad_token_id)

    def _read(self, logits: torch.Tensor) -> list[float]:
        scores = logits[..., 0] if logits.shape[-1] == 1 else logits.softmax(-1)[..., -1]
        return [float(score) for score in scores]

    def _from_all(self, results: dict[int, T], count: int) -> list[T]:
        by_row = {row: result for share in ranks.gathered(results) for row, result in share.items()}
        return [by_row[row] for row in range(count)]


def step_ends(response: str, separator: str) -> list[int]:
    """Finds the ends of a response's steps, in characters, including their separators. Blank text is not a step."""
    ends: list[int] = []
    begin = 0
    while begin < len(response):
        at = response.find(separator, begin)
        end = len(response) if at < 0 else at + len(separator)
        if response[begin : end if at < 0 else at].strip():
            ends.append(end)
        begin = end
    return ends
