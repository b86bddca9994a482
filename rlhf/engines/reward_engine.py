"""A reward model: a Hugging Face classifier that reads a conversation and says what its last message is worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlhf.data.prompts import Messages, beginning, with_response
from rlhf.engines import ranks
from rlhf.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """A step of a response, and its score."""

    end: int
    """Where the next one begins, in characters of the response."""
    score: float


class RewardEngine:
    """Every rank is given all conversations, reads its share, and has all the scores.

    A classifier with one label gives its logit; one with several, the probability of the last.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model.to(ranks.device())
        self.tokenizer = tokenizer
        self.padding = model.config.get_text_config().pad_token_id

    def scores(self, conversations: Sequence[tuple[Messages, str]], *, micro_batch_tokens: int) -> list[float]:
        """Of prompt and response, by a sequence classifier: as the model itself takes it from its tokens."""
        texts = [with_response(messages, response, self.tokenizer)[0] for messages, response in conversations]
        ids = self._tokens(texts)["input_ids"]
        found: dict[int, float] = {}
        for rows, logits in self._logits(ids, micro_batch_tokens):
            found |= dict(zip(rows.tolist(), self._read(logits), strict=True))
        return self._from_all(found, len(ids))

    def steps(
        self, conversations: Sequence[tuple[Messages, str]], separator: str, *, micro_batch_tokens: int
    ) -> list[list[Step]]:
        """Of prompt and response, by a token classifier: what it says at the last token of each step."""
        if not self.tokenizer.is_fast:
            raise UserError("the reward model's tokenizer is a slow one, which does not say where tokens begin")
        texts, ends, last = [], [], []
        for messages, response in conversations:
            text, start = with_response(messages, response, self.tokenizer)
            if start is None:
                raise UserError(f"the reward model's chat template changes a response, so its steps are lost: {text!r}")
            written = len(response.rstrip()) if self.tokenizer.chat_template else len(response)
            texts.append(text)
            ends.append(step_ends(response, separator))
            last.append([start + min(end, written) for end in ends[-1]])
        tokens = self._tokens(texts, return_offsets_mapping=True)
        ids, places = tokens["input_ids"], []
        for offsets, ends_in_text in zip(tokens["offset_mapping"], last, strict=True):
            begins = np.maximum.accumulate([begin for begin, _ in offsets])  # a special token's, at the end, may be 0
            places.append(np.searchsorted(begins, ends_in_text) - 1)
        found: dict[int, list[Step]] = {}
        for rows, logits in self._logits(ids, micro_batch_tokens):
            for row, of_tokens in zip(rows.tolist(), logits, strict=True):
                scores = self._read(of_tokens[places[row]])
                found[row] = [Step(end, score) for end, score in zip(ends[row], scores, strict=True)]
        return self._from_all(found, len(ids))

    def place(self, *, model: bool, optimizer: bool) -> None:
        """What lies on the device; the rest lies in host memory."""
        self.model.to(ranks.device() if model else "cpu")

    def _tokens(self, texts: list[str], **options: Any) -> Any:
        """A chat template writes its special tokens itself; without one, those stand before a text that begin it."""
        found = self.tokenizer(texts, add_special_tokens=False, **options)
        for row, ids in enumerate(found["input_ids"]):
            before = [] if self.tokenizer.chat_template else beginning(ids, self.tokenizer)
            found["input_ids"][row] = [*before, *ids]
            if "offset_mapping" in found:
                found["offset_mapping"][row] = [*[(0, 0)] * len(before), *found["offset_mapping"][row]]
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        for text, ids in zip(texts, found["input_ids"], strict=True):
            if longest is not None and len(ids) > longest:
                raise UserError(
                    f"the reward model reads at most {longest} tokens, and a conversation has {len(ids)} "
                    f"({text[:60]!r}...): choose another, or fork with a lower rollout.max_response_tokens"
                )
        return found

    def _logits(self, ids: list[list[int]], budget: int) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """This rank's pieces: rows, and the model's logits."""
        import torch

        lengths = np.array([len(row) for row in ids])
        for rows in ranks.pieces(lengths, budget):
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
        """A decoder scores the last token that is not padding. One that knows no padding token scores the last token;
        so that it can be asked about several conversations at once, one that none of them holds stands for it."""
        if self.padding is not None:
            return int(self.padding)
        used = {token for row in rows for token in ids[row]}
        config = self.model.config.get_text_config()
        config.pad_token_id = next(token for token in range(config.vocab_size) if token not in used)
        return int(config.pad_token_id)

    def _read(self, logits: torch.Tensor) -> list[float]:
        found = logits[..., 0] if logits.shape[-1] == 1 else logits.softmax(-1)[..., -1]
        return [float(each) for each in found]

    def _from_all(self, mine: dict[int, T], count: int) -> list[T]:
        found = {row: one for share in ranks.gathered(mine) for row, one in share.items()}
        return [found[row] for row in range(count)]


def step_ends(response: str, separator: str) -> list[int]:
    """Where each step ends, its separator included, in characters; what is blank is no step."""
    ends: list[int] = []
    begin = 0
    while begin < len(response):
        at = response.find(separator, begin)
        end = len(response) if at < 0 else at + len(separator)
        if response[begin : end if at < 0 else at].strip():
            ends.append(end)
        begin = end
    return ends


def text_lengths(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """How many characters the tokens say, up to and with each of them; special ones say none."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)
    backend = tokenizer.backend_tokenizer
    return np.cumsum([len(stream.step(backend, token) or "") for token in ids])
