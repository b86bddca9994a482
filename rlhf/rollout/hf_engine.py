"""`rollout.engine: hf`: generates with a transformers model and a KV cache, one token at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ratchet.rlhf import seeding
from ratchet.rlhf.distributed import determinism
from ratchet.rlhf.distributed.host_buffers import HostBuffers, release_memory
from ratchet.rlhf.models import prefix_sharing
from ratchet.rlhf.models.decoding import Decoder, Decoding, decoding_of
from ratchet.rlhf.models.hub_layout import copy_weights
from ratchet.rlhf.models.image_processor import joined
from ratchet.rlhf.models.kernels import as_written
from ratchet.rlhf.models.routes import OWN, Routers
from ratchet.rlhf.rollout.engine import Chunk, Request, RolloutEngine, Sampling, Scored, limit_of

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ratchet.rlhf.config.sections import Dtype
    from ratchet.rlhf.models.vision import Vision


CHUNK_STEPS = 16
"""Steps between two chunks of a batch."""


@dataclass(eq=False)
class _Row:
    """A request in a batch, or waiting for one."""

    request: Request
    sampling: Sampling
    chunks: asyncio.Queue[Chunk | BaseException]
    is_open: bool = True
    """True while a consumer still reads the chunks."""


class _Prompt(NamedTuple):
    """What a request reads. Requests that read the same share it."""

    ids: tuple[int, ...]
    images: tuple[bytes, ...]
    mask: tuple[int, ...]
    """For each token at the end that was not in the trajectory's prompt, 1 if the policy drew it: then it names no
    image. Empty for a model that reads text only."""

    @classmethod
    def of(cls, request: Request, *, sees: bool) -> _Prompt:
        return cls(request.prompt_ids, request.images, request.mask if sees else ())


@dataclass
class _Routes:
    """The experts that the tokens of a batch went to."""

    of_prompts: list[np.ndarray]
    """Those of each prompt's tokens, shape (tokens, slots)."""
    prompt_of: list[int]
    """The number of each request's prompt."""
    steps: list[Tensor] = field(default_factory=list)
    """Those of the token that each request reads in each step after its prompt, shape (requests, slots)."""

    def of(self, number: int, length: int) -> np.ndarray:
        """Returns those of a request's tokens, of which a response of this length has read all but the last."""
        read = [experts[number] for experts in self.steps[: length - 1]]
        of_response = [torch.stack(read).cpu().numpy()] if read else []
        return np.concatenate([self.of_prompts[self.prompt_of[number]], *of_response])


class HFRollout(RolloutEngine):
    """Generates with a model in this process. It may be the actor itself; weights then need no copy.

    All trajectories that have joined form one batch, which finished rows leave. Requests of trajectories that have not
    joined form a batch with those that arrive while another batch is generated. The noise that samples a token depends
    only on the seed, the trajectory and the token's position, so a batch is a pure function of requests and weights.
    """

    in_batches = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: tuple[int, ...],
        dtype: Dtype = "float32",
        tokenizer: PreTrainedTokenizerBase | None = None,
        records_routes: bool = False,
        vision: Vision | None = None,
    ) -> None:
        """Wraps a model, which is on its device; the tokenizer is only needed for stop texts.

        With `vision`, requests may have images. With `records_routes`, chunks have the experts that a mixture of
        experts chose. Raises UserError if the model cannot generate with a cache, or has no experts.
        """
        from ratchet.rlhf.models import kv_cache

        self.model = model
        self.tokenizer = tokenizer
        self.vision = vision
        self.dtype = dtype
        self.shares_prompts = prefix_sharing.adopt(model) and kv_cache.fits(model)
        self.decoding = Decoding(selects=True, pads=True) if self.shares_prompts else decoding_of(model)
        self.routers = Routers.of(model) if records_routes else None
        self.eos = torch.tensor(eos_token_ids, device=model.device)
        self.device = model.device
        self._buffers = HostBuffers(model.device)
        self._joined = 0
        self._waiting: list[_Row] = []
        self._running = 0
        """Batches that are being generated."""
        # one thread, so that a batch and new weights never overlap; with the caller's number of threads for the sums
        self._thread = ThreadPoolExecutor(1, "hf-rollout", torch.set_num_threads, (torch.get_num_threads(),))

    def place(self, *, model: bool, optimizer: bool) -> None:
        if model:
            self._buffers.give_back()
        elif self._buffers.take((*self.model.parameters(), *self.model.buffers())):
            release_memory(self.device)

    def close(self) -> None:
        """Ends the engine's thread."""
        self._thread.shutdown()

    def score(self, texts: Sequence[Sequence[int]], drawn: int) -> dict[str, list[Scored]]:
        """Scores texts; see `RolloutEngine.score`. Draws nothing after them: no cache outlives a batch."""
        computed = self._thread.submit(self._log_probs_of, texts).result()
        return {"": [Scored(tuple(log_probs)) for log_probs in computed]}

    @torch.no_grad()
    def _log_probs_of(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        was_training = self.model.training
        self.model.eval()
        try:
            computed: list[list[float]] = []
            for text in texts:
                ids = torch.tensor([text], device=self.model.device)
                log_probs = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
                computed.append(log_probs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
            return computed
        finally:
            self.model.train(was_training)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], adapter_config: bytes | None = None) -> int:
        self._buffers.give_back()
        return self._thread.submit(copy_weights, weights, self.model).result()

    def join(self, count: int) -> None:
        self._joined += count

    def leave(self) -> None:
        """Leaves; the batch starts if all others are waiting. See `RolloutEngine.leave`."""
        self._joined -= 1
        self._start_if_complete()

    async def stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """Generates a response in a batch with all that have joined; see `RolloutEngine.stream`."""
        row = _Row(request, sampling, asyncio.Queue())
        self._waiting.append(row)
        self._start_if_complete()
        try:
            while True:
                chunk = await row.chunks.get()
                if isinstance(chunk, BaseException):
                    raise chunk
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            row.is_open = False  # the batch ends early if nobody waits for its rows
            if row in self._waiting:
                self._waiting.remove(row)

    def _start_if_complete(self) -> None:
        if self._waiting and len(self._waiting) >= self._joined and not self._running:
            batches: dict[tuple[Sampling, int], list[_Row]] = {}
            # sorted: a batch must not depend on the order of arrival
            for row in sorted(self._waiting, key=lambda row: row.request.trajectory_id):
                length = 0 if self.decoding.pads else len(row.request.prompt_ids)
                batches.setdefault((row.sampling, length), []).append(row)
            self._waiting = []
            for rows in batches.values():  # a batch shares its sampling; agents choose their own stop texts
                self._running += 1
                self._thread.submit(self._run, rows, asyncio.get_running_loop())

    def _end_batch(self) -> None:
        self._running -= 1
        self._start_if_complete()

    def _run(self, rows: list[_Row], loop: asyncio.AbstractEventLoop) -> None:
        """Generates a batch, in the engine's thread."""

        def put(row: _Row, chunk: Chunk | BaseException) -> None:
            loop.call_soon_threadsafe(row.chunks.put_nowait, chunk)

        was_training = self.model.training
        self.model.eval()
        last: list[tuple[_Row, Chunk | BaseException]] = []
        """Put after the model, which may be the actor, is back in its mode: the batch may then be complete."""
        casts = self.dtype == "bfloat16" and self.model.dtype != torch.bfloat16  # an actor's weights are rounded
        try:
            with (
                torch.inference_mode(),
                torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=casts),
                as_written(self.model),
            ):
                for row, chunk in self._generate(rows):
                    for held in last:
                        put(*held)
                    last = [(row, chunk)]
        except BaseException as error:
            last = [(row, error) for row in rows]
        finally:
            self.model.train(was_training)
            for held in last:
                put(*held)
            loop.call_soon_threadsafe(self._end_batch)

    def _ends(self, response: np.ndarray, sampling: Sampling) -> bool:
        is_eos = int(response[-1]) in self.eos.tolist()
        return (is_eos and not sampling.ignore_eos) or self._stops(response, sampling)

    def _stops(self, response: np.ndarray, sampling: Sampling) -> bool:
        """Returns True if the end of a response contains a stop text."""
        if not sampling.stop:
            return False
        assert self.tokenizer is not None
        # only the last tokens are decoded: a token has at least one byte, and a character at most 4
        tail = response[-4 * max(map(len, sampling.stop)) - 4 :].tolist()
        text = str(self.tokenizer.decode(tail, skip_special_tokens=False))
        return any(stop in text for stop in sampling.stop)

    def _generate(self, rows: Sequence[_Row]) -> Iterator[tuple[_Row, Chunk]]:
        """Generates a batch, yielding the rows' new tokens every `CHUNK_STEPS` steps."""
        from ratchet.rlhf.models import kv_cache
        from ratchet.rlhf.models.kv_cache import CachedPrompts

        requests, sampling = [row.request for row in rows], rows[0].sampling
        assert all(row.sampling == sampling for row in rows), "a batch has one way of sampling"
        device = self.model.device
        prompts = [_Prompt.of(request, sees=self.vision is not None) for request in requests]
        prompt_of = torch.arange(len(requests), device=device)
        if self.decoding.selects:  # a shared prompt is computed once
            of_requests, prompts = prompts, list(dict.fromkeys(prompts))
            numbers = {prompt: number for number, prompt in enumerate(prompts)}
            prompt_of = torch.tensor([numbers[own] for own in of_requests], device=device)
        longest = max(len(prompt.ids) for prompt in prompts)
        input_ids, positions, images = self._read_first(prompts, longest)
        padding = longest - torch.tensor([len(prompt.ids) for prompt in prompts], device=device)
        uniforms = torch.from_numpy(_uniforms(requests, sampling)).to(device)

        out_tokens = torch.zeros((len(requests), sampling.max_tokens), dtype=torch.long, device=device)
        out_log_probs = torch.zeros((len(requests), sampling.max_tokens), device=device)
        limits = torch.tensor([limit_of(request, sampling) for request in requests], device=device)
        lengths = limits.clone()
        # no row can end early, so that no step has to look for ends
        together = sampling.ignore_eos and not sampling.stop and int(limits.min()) == sampling.max_tokens
        active = torch.arange(len(requests), device=device)
        finished = torch.zeros(len(requests), dtype=torch.bool, device=device)
        decoder = Decoder(self.model)
        is_real = torch.arange(longest + sampling.max_tokens, device=device)[None, :] >= padding[:, None]
        inputs: dict[str, Any] = {"attention_mask": is_real[:, :longest] if padding.any() else None, **images}
        cached: CachedPrompts | None = None

        emitted = [0] * len(rows)
        routes: _Routes | None = None
        for step in range(sampling.max_tokens):
            with nullcontext() if self.routers is None else self.routers.recording() as recorded:
                logits = decoder.read(input_ids, positions, **inputs)
            if recorded is not None:
                chosen = torch.cat([choice for [choice] in recorded], dim=-1).to(torch.int16)
                if routes is None:  # the prompts, padded on the left
                    padded = zip(chosen.view(*input_ids.shape, -1).cpu().numpy(), prompts, strict=True)
                    of_prompts = [experts[longest - len(prompt.ids) :] for experts, prompt in padded]
                    routes = _Routes(of_prompts, prompt_of.tolist())
                else:
                    everyone = chosen.new_full((len(rows), chosen.shape[-1]), OWN)
                    routes.steps.append(everyone.index_copy(0, active, chosen))
            if step == 0:  # the prompts were computed; from here on, each response has its own row
                logits, positions = logits[prompt_of], positions[..., prompt_of, :]
                if self.shares_prompts:
                    visible = is_real[:, :longest] if padding.any() else None
                    cached = CachedPrompts.of(decoder.cache, visible, prompt_of)
                    decoder.cache = kv_cache.in_place(len(decoder.cache.layers))
                elif self.decoding.selects:
                    decoder.select(prompt_of)
                    is_real = is_real[prompt_of]
            tokens, log_probs = sample(logits, uniforms[active, step], sampling)
            out_tokens[active, step], out_log_probs[active, step] = tokens, log_probs
            if not together:
                ends = self._end_now(tokens, out_tokens[active, : step + 1], sampling) | (limits[active] == step + 1)
                ends &= ~finished[active]
                lengths[active[ends]] = step + 1
                finished[active[ends]] = True
            is_last = step + 1 == sampling.max_tokens or (not together and bool(finished.all()))
            if is_last or (step + 1) % CHUNK_STEPS == 0:
                ended = torch.ones_like(finished) if is_last else finished
                yield from self._chunks(rows, out_tokens, out_log_probs, lengths, ended, step + 1, emitted, routes)
            if is_last or not any(row.is_open for row in rows):
                return
            if not together and self.decoding.selects:
                running = ~finished[active]
                if int(running.sum()) <= 0.75 * len(active):  # finished rows cost as much as others, so drop them
                    kept = running.nonzero().squeeze(-1)
                    cached = None if cached is None else cached.only(kept)
                    decoder.select(kept)
                    active, tokens, positions = active[kept], tokens[kept], positions[..., kept, :]
                    is_real = is_real if self.shares_prompts else is_real[kept]
            input_ids = (tokens if self.vision is None else self.vision.next_tokens(tokens))[:, None]
            positions = _next(positions)
            inputs = {}
            if cached is not None:
                inputs = prefix_sharing.inputs(cached)
            elif padding.any():
                inputs = {"attention_mask": is_real[:, : longest + step + 1]}

    def _read_first(
        self, prompts: Sequence[_Prompt], longest: int
    ) -> tuple[Int[Tensor, "prompts time"], Int[Tensor, "*axes prompts time"], dict[str, Tensor]]:
        """Returns the tokens and positions of prompts, and the arguments of the model's forward for their images.

        Prompts are padded on the left, so that the next tokens of all rows are in the same column.
        """
        tokens = [np.asarray(prompt.ids, dtype=np.int64) for prompt in prompts]
        axes = [np.arange(len(ids))[None] for ids in tokens]
        images: dict[str, Tensor] = {}
        if self.vision is not None:
            tokens = [
                self.vision.readable(ids, np.pad(np.array(prompt.mask, dtype=bool), (len(ids) - len(prompt.mask), 0)))
                for ids, prompt in zip(tokens, prompts, strict=True)
            ]
            seen = [[self.vision(image) for image in prompt.images] for prompt in prompts]
            if any(seen):
                axes = [self.vision.positions(ids, of_prompt) for ids, of_prompt in zip(tokens, seen, strict=True)]
            images = joined([image for of_prompt in seen for image in of_prompt])

        def padded(values: np.ndarray) -> np.ndarray:
            return np.pad(values, [*[(0, 0)] * (values.ndim - 1), (longest - values.shape[-1], 0)])

        ids, positions = np.stack([*map(padded, tokens)]), np.stack([*map(padded, axes)], axis=1)
        placed = [torch.from_numpy(values).to(self.model.device) for values in (ids, positions)]
        return (
            placed[0],
            placed[1][0] if len(positions) == 1 else placed[1],
            {name: tensor.to(self.model.device) for name, tensor in images.items()},
        )

    def _chunks(
        self,
        rows: Sequence[_Row],
        tokens: Tensor,
        log_probs: Tensor,
        lengths: Tensor,
        ended: Tensor,
        steps: int,
        emitted: list[int],
        routes: _Routes | None,
    ) -> Iterator[tuple[_Row, Chunk]]:
        """Yields what the rows have generated since the last call, and updates `emitted`, their lengths so far."""
        all_tokens, all_log_probs = tokens[:, :steps].cpu().numpy(), log_probs[:, :steps].cpu().numpy()
        for number, (row, length, has_ended) in enumerate(zip(rows, lengths.tolist(), ended.tolist(), strict=True)):
            first, last = emitted[number], min(length, steps)
            if first == last:
                continue  # ended earlier
            emitted[number] = last
            reason = None
            if has_ended:
                reason = "stop" if self._ends(all_tokens[number, :last], row.sampling) else "length"
            new = slice(first, last)
            read = None if routes is None or reason is None else routes.of(number, last)
            yield (
                row,
                Chunk(
                    tuple(all_tokens[number, new].tolist()), tuple(all_log_probs[number, new].tolist()), reason, read
                ),
            )

    def _end_now(self, tokens: Tensor, responses: Tensor, sampling: Sampling) -> Tensor:
        ends = torch.zeros_like(tokens, dtype=torch.bool) if sampling.ignore_eos else torch.isin(tokens, self.eos)
        if sampling.stop:
            stops = [self._stops(response, sampling) for response in responses.cpu().numpy()]
            ends |= torch.tensor(stops, device=ends.device)
        return ends


def _next(positions: Int[Tensor, "*axes rows time"]) -> Int[Tensor, "*axes rows 1"]:
    """Returns the positions of the tokens that follow: text is one after all before it, on each axis."""
    last = positions.amax(-1, keepdim=True)
    return (last if last.dim() == 2 else last.amax(0, keepdim=True).expand_as(last)) + 1


def sample(
    logits: Float[Tensor, "batch vocab"], uniforms: Float[Tensor, " batch"], sampling: Sampling
) -> tuple[Tensor, Float[Tensor, " batch"]]:
    """Samples one token per row by inverting the cumulative distribution.

    Args:
        uniforms: a uniform number in [0, 1) per row, float64, shape (batch,).
        sampling: temperature and truncation; temperature 0 is greedy.

    Returns:
        Token ids, shape (batch,), and their log-probs in nats before truncation, float32, shape (batch,).
    """
    logits = logits.float()
    if sampling.temperature == 0:
        log_probs = logits.log_softmax(-1)
        tokens = log_probs.argmax(-1)
        return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)
    log_probs = (logits / sampling.temperature).log_softmax(-1)
    probs = log_probs.double().exp()
    with determinism.relaxed():  # the last bits of running sums hardly ever decide which token is drawn
        if sampling.truncates:
            probs = _truncated(probs, sampling)
        cumulative = probs.cumsum(-1)
    # just below the total, so that rounding never selects a position after the last token with nonzero probability
    drawn = uniforms[:, None] * cumulative[:, -1:] * (1 - 1e-12)
    # with NaN, the index would be out of range
    tokens = torch.searchsorted(cumulative, drawn, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def _truncated(probs: Float[Tensor, "batch vocab"], sampling: Sampling) -> Float[Tensor, "batch vocab"]:
    """Zeroes what `min_p`, then `top_k`, then `top_p` exclude, in vLLM's order; the rest need not sum to 1."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(ordered < sampling.min_p * ordered[:, :1], 0.0)
    if sampling.top_k > 0:
        ordered[:, sampling.top_k :] = 0.0
    before = ordered.cumsum(-1) - ordered
    beyond = before >= sampling.top_p * ordered.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, order, ordered.masked_fill(beyond, 0.0))


def _uniforms(requests: Sequence[Request], sampling: Sampling) -> np.ndarray:
    """Draws uniform numbers, shape (requests, max_tokens); each depends only on seed, trajectory and position."""
    rows = [
        (seeding.generator(sampling.seed, "generate", request.trajectory_id), request.generated_tokens)
        for request in requests
    ]
    # numbers of earlier tokens are skipped, so that an interrupted response continues with the same noise
    return np.stack([generator.random(start + sampling.max_tokens)[start:] for generator, start in rows])
