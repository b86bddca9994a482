"""`rollout.engine: server`: generation by servers that exchange token ids over HTTP.

The servers are started separately and keep running when a run ends. New weights are written to a folder that the
servers can read, or broadcast to SGLang servers (`sglang_weights`).
"""

from __future__ import annotations

import asyncio
import random
import secrets
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ratchet.rlhf import event_loop
from ratchet.rlhf.data.images import as_decoded, data_url
from ratchet.rlhf.distributed import ranks
from ratchet.rlhf.errors import EngineLost, RatchetError, UserError
from ratchet.rlhf.rollout.engine import (
    Chunk,
    Generation,
    Request,
    RolloutEngine,
    Sampling,
    Scored,
    canary_requests,
    joined,
    limit_of,
    scored_of,
    seed_of,
    with_answers,
)
from ratchet.rlhf.rollout.sent_prompts import SentPrompt, check_read, stop_tokens
from ratchet.rlhf.rollout.server_requests import TRIES, Ask, Away, Servers, patiently
from ratchet.rlhf.weights.weight_files import write_weights

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from ratchet.rlhf.config.sections import Dtype
    from ratchet.rlhf.models.image_processor import ImageProcessor

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
REMEMBERED = 2**16
"""Prompts whose last server is remembered."""
STREAM_INTERVAL = 16
"""Tokens per event of a server's stream: with a small model, an event costs more than a token."""


@dataclass(frozen=True)
class TopTokens:
    """A server's opinion of tokens of a text, at temperature 1 and in nats."""

    log_probs: Float32
    """Log-probs of the text's own tokens, shape (tokens,)."""
    ids: Int32
    """The most likely tokens, the most likely first, shape (tokens, k)."""
    top_log_probs: Float32
    """Their log-probs, shape (tokens, k)."""

    @classmethod
    def of(cls, text: Sequence[int], entries: Sequence[Mapping[str, Mapping[str, Any]]], top_k: int) -> TopTokens:
        """Reads vLLM's `prompt_logprobs`: by token, of the most likely tokens and the text's own one."""
        own = np.array([entry[str(token)]["logprob"] for token, entry in zip(text, entries, strict=True)], np.float32)
        ids = np.zeros((len(text), top_k), np.int32)
        log_probs = np.zeros((len(text), top_k), np.float32)
        for row, entry in enumerate(entries):
            top = sorted(((-value["logprob"], int(token)) for token, value in entry.items()))[:top_k]
            ids[row] = [token for _, token in top]
            log_probs[row] = [-negative for negative, _ in top]
        return cls(own, ids, log_probs)


class GenerationApi(Protocol):
    """The HTTP interface of one kind of server."""

    def stream(
        self, ask: Ask, request: Request, sampling: Sampling, seed: int | None, eos: Sequence[int]
    ) -> AsyncGenerator[Chunk, None]:
        """Generates one response.

        Args:
            seed: seed of the request, a non-negative int64; None: the server's own noise.

        Raises:
            Away: the server does not answer or is unavailable.
            UserError: the server refuses the request.
        """
        ...

    async def log_probs_of(self, ask: Ask, text: Sequence[int]) -> list[float]:
        """Computes the log-probs of a text's tokens but the first, at temperature 1, without a prefix cache. Raises as
        `stream`."""
        ...

    async def load(self, ask: Ask, folder: Path) -> None:
        """Loads the weights in a folder.

        Args:
            folder: safetensors files and the model's config.

        Raises:
            Away: the server does not answer or is unavailable.
            UserError: the server cannot load weights.
        """
        ...


class VLLMApi:
    """`vllm serve` (OpenAI-compatible completions, as of 0.32).

    Prompts with images go to another of its interfaces, `--enable-scale-out`: completions take none.
    """

    def __init__(self, images: ImageProcessor | None = None) -> None:
        """Takes the processor of the model's images; None: it reads text only, or the requests do."""
        self.models: dict[str, str] = {}
        self.images = images

    async def stream(
        self, ask: Ask, request: Request, sampling: Sampling, seed: int | None, eos: Sequence[int]
    ) -> AsyncGenerator[Chunk, None]:
        prompt = SentPrompt.of(request, self.images)
        parameters = {
            **sampling.parameters,
            "max_tokens": limit_of(request, sampling),
            "seed": seed,
            # explicitly neutral, since defaults from the model's generation_config.json would change the sampling
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,  # only the sampled token's
            "ignore_eos": True,  # stop_token_ids has all end-of-sequence tokens
            "stop_token_ids": stop_tokens(self.images, sampling, eos),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
        common = {"model": await self._model(ask), "return_token_ids": True, "stream": True}
        if prompt.images:
            async with aclosing(self._seeing(ask, prompt, common | {"sampling_params": parameters})) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        body = {**common, **parameters, "prompt": prompt.ids, "stream_interval": STREAM_INTERVAL}
        async with aclosing(ask.events("/v1/completions", body)) as events:
            async for event in events:
                if "error" in event:
                    raise Away(f"{ask.url}/v1/completions failed: {event['error']}")
                [choice] = event["choices"]
                reason = {None: None, "stop": "stop"}.get(choice["finish_reason"], "length")
                log_probs = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else ()
                yield Chunk(tuple(choice["token_ids"]), tuple(log_probs), reason)

    async def _seeing(self, ask: Ask, prompt: SentPrompt, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """Generates the response to a prompt with images."""
        parts = [{"type": "image_url", "url": data_url(as_decoded(image, "an image"))} for image in prompt.images]
        body = {**body, "token_ids": prompt.short_ids, "content_parts": parts}
        async with aclosing(ask.events("/inference/v1/generate", body)) as events:
            async for event in events:
                if "error" in event:
                    raise Away(f"{ask.url}/inference/v1/generate failed: {event['error']}")
                if (read := event.get("prompt_token_ids")) is not None:
                    check_read(prompt.ids, read, ask.url)
                [choice] = event["choices"]
                reason = {None: None, "stop": "stop"}.get(choice["finish_reason"], "length")
                drawn = choice["logprobs"]["content"] if choice["logprobs"] else ()
                yield Chunk(tuple(choice["token_ids"]), tuple(token["logprob"] for token in drawn), reason)

    async def log_probs_of(self, ask: Ask, text: Sequence[int]) -> list[float]:
        return [float(log_prob) for log_prob in (await self.top_tokens_of(ask, text, 1, 0)).log_probs]

    async def top_tokens_of(self, ask: Ask, text: Sequence[int], start: int, top_k: int) -> TopTokens:
        """Computes log-probs of the tokens of a text from number `start` (at least 1) on, and of the `top_k` most
        likely tokens there. Raises as `log_probs_of`."""
        body = {
            "model": await self._model(ask),
            "prompt": list(text),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top_k,
        }
        [choice] = (await ask("/v1/completions", body))["choices"]
        return TopTokens.of(text[start:], choice["prompt_logprobs"][start:], top_k)

    async def card(self, ask: Ask) -> Mapping[str, Any]:
        """Returns what a server says of its model. Raises as `log_probs_of`."""
        card: Mapping[str, Any] = (await ask("/v1/models"))["data"][0]
        return card

    async def _model(self, ask: Ask) -> str:
        if ask.url not in self.models:
            self.models[ask.url] = str((await self.card(ask))["id"])
        return self.models[ask.url]

    async def load(self, ask: Ask, folder: Path) -> None:
        try:
            await ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            await ask("/reset_prefix_cache", {})
            if self.images is not None:
                await ask("/reset_encoder_cache", {})  # of images; vLLM 0.32 crashes without it
        except UserError as error:
            raise UserError(
                f"{ask.url} cannot load new weights ({error}): start `vllm serve` with VLLM_SERVER_DEV_MODE=1, and let "
                f"it read {folder.parent}"
            ) from None


class SGLangApi:
    """SGLang's `/generate` and `/update_weights_from_disk`, as of 0.5.23.

    A server started without `--enable-deterministic-inference` ignores seeds. One started with it gives all requests
    without a seed the same noise, and crashes on `min_p`.
    """

    def __init__(self) -> None:
        self.seeded: dict[str, bool] = {}
        """True for servers that honour seeds, by URL."""

    async def stream(
        self, ask: Ask, request: Request, sampling: Sampling, seed: int | None, eos: Sequence[int]
    ) -> AsyncGenerator[Chunk, None]:
        await self._check(ask, sampling, seed)
        limit = limit_of(request, sampling)
        body = {
            "input_ids": list(request.prompt_ids),
            "sampling_params": {
                **sampling.parameters,
                "top_k": sampling.parameters["top_k"] or -1,
                "max_new_tokens": limit,
                # without a seed, a deterministic server would give all requests the same noise
                "sampling_seed": secrets.randbits(63) if seed is None else seed,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "ignore_eos": sampling.ignore_eos,  # it also applies to stop_token_ids
                "stop_token_ids": [] if sampling.ignore_eos else list(eos),
                "no_stop_trim": True,
                "skip_special_tokens": False,
                "stream_interval": STREAM_INTERVAL,
            },
            "return_logprob": True,
            "stream": True,
        }
        so_far = 0
        async with aclosing(ask.events("/generate", body)) as events:
            async for event in events:
                if "error" in event:
                    problem = f"{ask.url}/generate failed: {event['error']['message']}"
                    raise UserError(problem) if event["error"]["code"] == 400 else Away(problem)
                meta = event["meta_info"]
                finish = meta["finish_reason"]
                if finish is not None and finish["type"] == "abort":
                    raise Away(f"{ask.url} ended a response early: {finish.get('message')}")
                # an event has all tokens so far; with --incremental-streaming-output, only the new ones
                new = meta["completion_tokens"] - so_far
                pairs = meta["output_token_logprobs"][-new:] if new else []
                so_far += len(pairs)
                reason = None if finish is None else "stop" if finish["type"] == "stop" else "length"
                if reason == "length" and so_far < limit:
                    raise UserError(
                        f"{ask.url} has room for {so_far} of the {limit} tokens that may follow a prompt of "
                        f"{len(request.prompt_ids)}: start SGLang with a --context-length of at least "
                        f"{len(request.prompt_ids) + limit + UNUSED}, and with as large a --max-total-tokens"
                    )
                yield Chunk(
                    tuple(int(token) for _, token, *_ in pairs),
                    tuple(float(log_prob) for log_prob, *_ in pairs),
                    reason,
                )

    async def log_probs_of(self, ask: Ask, text: Sequence[int]) -> list[float]:
        body = {
            "input_ids": list(text),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        pairs = (await ask("/generate", body))["meta_info"]["input_token_logprobs"]
        return [float(log_prob) for log_prob, *_ in pairs[1:]]  # the first token has none

    async def _check(self, ask: Ask, sampling: Sampling, seed: int | None) -> None:
        """Raises UserError if the server cannot sample in this way."""
        if ask.url not in self.seeded:
            self.seeded[ask.url] = bool((await ask("/server_info"))["enable_deterministic_inference"])
        seeded = self.seeded[ask.url]
        if not seeded and seed is not None and sampling.temperature > 0:
            raise UserError(
                f"{ask.url} ignores seeds: start SGLang with --enable-deterministic-inference, or set rollout.seeds: "
                "engine"
            )
        if seeded and sampling.truncates and sampling.min_p:
            raise UserError(
                f"{ask.url} has no min_p: start SGLang without --enable-deterministic-inference and set rollout.seeds: "
                "engine, or remove rollout.min_p"
            )

    async def load(self, ask: Ask, folder: Path) -> None:
        try:
            # a cancelled request keeps running for seconds, and the cache cannot be flushed while one runs
            body = {"model_path": str(folder), "abort_all_requests": True, "flush_cache": False}
            await ask("/update_weights_from_disk", body)
            await ask(f"/flush_cache?timeout={ask.timeout_s}", {})
        except UserError as error:
            raise UserError(f"{ask.url} cannot load new weights ({error}): let it read {folder.parent}") from None


UNUSED = 2
"""Tokens of its context that SGLang leaves unused."""


class TGIApi:
    """Text Generation Inference's `/generate` (3.x), checked against recorded answers; never run.

    It takes the prompt as text, which its tokenizer may turn into different tokens, and cannot load new weights: use it
    for evaluation only.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Uses `tokenizer` to turn prompts into text; with None, generation is impossible."""
        self.tokenizer = tokenizer

    async def stream(
        self, ask: Ask, request: Request, sampling: Sampling, seed: int | None, eos: Sequence[int]
    ) -> AsyncGenerator[Chunk, None]:
        """Generates one response, in one chunk; see `GenerationApi.stream`."""
        assert self.tokenizer is not None, "prompts are sent as text"
        parameters: dict[str, Any] = {
            "max_new_tokens": limit_of(request, sampling),
            "do_sample": sampling.temperature > 0,
            "seed": seed,
            "repetition_penalty": 1.0,
            "stop": list(sampling.stop),
            "details": True,
            "return_full_text": False,
        }
        if sampling.temperature > 0:
            parameters["temperature"] = sampling.temperature
        if sampling.truncates and sampling.top_p < 1:  # the server refuses 1
            parameters["top_p"] = sampling.top_p
        if sampling.truncates and sampling.top_k:
            parameters["top_k"] = sampling.top_k
        text = self.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
        answer = await ask("/generate", {"inputs": text, "parameters": parameters})
        details = (answer[0] if isinstance(answer, list) else answer)["details"]
        reason = "length" if details["finish_reason"] == "length" else "stop"
        tokens = [(int(token["id"]), float(token["logprob"])) for token in details["tokens"]]
        yield Chunk(tuple(token for token, _ in tokens), tuple(log_prob for _, log_prob in tokens), reason)

    async def log_probs_of(self, ask: Ask, text: Sequence[int]) -> list[float]:
        """Raises UserError: this server does not score texts."""
        raise UserError(f"{ask.url} (rollout.engine.api tgi) does not score texts: use it for evaluation only")

    async def load(self, ask: Ask, folder: Path) -> None:
        """Raises UserError: this server cannot load new weights."""
        raise UserError(f"{ask.url} (rollout.engine.api tgi) cannot load new weights: use it for evaluation only")


APIS: dict[str, Callable[[PreTrainedTokenizerBase | None, ImageProcessor | None], GenerationApi]] = {
    "vllm": lambda _, images: VLLMApi(images),
    "sglang": lambda *_: SGLangApi(),
    "tgi": lambda tokenizer, _: TGIApi(tokenizer),
}


class ServerRollout(RolloutEngine):
    """Distributes requests over servers."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api: Literal["vllm", "sglang", "tgi"] = "vllm",
        eos_token_ids: tuple[int, ...],
        timeout_s: float = 600.0,
        weights_folder: Path | None = None,
        dtype: Dtype = "float32",
        model_folder: Path | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        """Connects to the servers at the base URLs `urls`; sends no request yet.

        Args:
            timeout_s: seconds without progress after which a server counts as unavailable.
            weights_folder: folder for new weights, at the same path on the servers; None: SGLang servers receive them
                by broadcast, and other servers keep theirs.
            dtype: type in which new weights are broadcast.
            model_folder: folder with the model's config, which some servers need next to new weights.
            tokenizer: only needed for `tgi`, which takes prompts as text.
            images: processor of the model's images, which only `vllm` takes; None: the model reads text only.
        """
        self.api = APIS[api](tokenizer, images)
        self.eos, self.weights_folder, self.model_folder = eos_token_ids, weights_folder, model_folder
        self.dtype: Dtype = dtype
        self._servers = Servers(urls, timeout_s)
        self.servers = self._servers.all
        self._served: dict[tuple[int, ...], Ask] = {}
        """The server that last got a prompt, which it may have cached."""
        self._loads = 0

    async def stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """Generates a response; see `RolloutEngine.stream`. If a server fails, another one continues."""
        seed, so_far, failures = seed_of(request, sampling), 0, 0
        while True:
            async with self._server(request) as server:
                try:
                    async with aclosing(self.api.stream(server, request, sampling, seed, self.eos)) as chunks:
                        async for chunk in chunks:
                            server.failures = failures = 0
                            so_far += len(chunk.response_ids)
                            request = _continued(request, sampling, chunk)
                            yield chunk
                            if chunk.finish_reason is not None:
                                return
                    # without a finish reason
                    raise Away(f"{server.url} ended a response early")
                except Away as error:
                    server.failures += 1
                    failures += 1
                    if failures == TRIES:
                        raise EngineLost(str(error)) from None
            # random, so that the requests of a failed server do not all retry at the same time
            await asyncio.sleep(random.uniform(0, min(0.2 * 2**failures, 10)))

    @asynccontextmanager
    async def _server(self, request: Request) -> AsyncIterator[Ask]:
        """Waits for a server with room: the one that has the prompt, or the one with the fewest requests."""
        # the server that has this prompt in its cache is preferred over the least busy one
        async with self._servers.one(lambda: self._served.get(request.prompt_ids)) as server:
            self._served[request.prompt_ids] = server
            if len(self._served) > REMEMBERED:
                self._served.pop(next(iter(self._served)))  # the oldest
            yield server

    def from_each(self, request: Request, sampling: Sampling) -> dict[str, Generation]:
        """Sends the same request to every server; returns their responses by URL. Raises EngineLost."""
        return self._servers.each(partial(self._whole, request, sampling))

    def score(self, texts: Sequence[Sequence[int]], drawn: int) -> dict[str, list[Scored]]:
        requests, sampling = canary_requests(texts, drawn)

        async def scored(server: Ask) -> list[Scored]:
            answers = await event_loop.gather([self._whole(request, sampling, server) for request in requests])
            joint = with_answers(texts, answers)
            return scored_of(texts, answers, [await self.api.log_probs_of(server, text) for text in joint])

        return self._servers.each(scored)

    async def _whole(self, request: Request, sampling: Sampling, server: Ask) -> Generation:
        seed = seed_of(request, sampling)
        return joined([chunk async for chunk in self.api.stream(server, request, sampling, seed, self.eos)])

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], adapter_config: bytes | None = None) -> int:
        """Replaces the weights of all servers; see `RolloutEngine.load_weights`."""
        assert adapter_config is None, "the config refuses adapters"
        problem: RatchetError | None = None
        written = 0
        # rank 0 sends the weights; the others help to gather them, and wait until the servers have loaded them
        if ranks.rank() == 0:
            try:
                if self.weights_folder is not None:
                    written = self._write(weights, self.weights_folder)
                elif isinstance(self.api, SGLangApi):
                    written = self._broadcast(weights)
                else:
                    raise UserError(
                        "rollout.engine.weights_folder is null, so the servers cannot take these weights: name "
                        "a folder that they can read"
                    )
            except RatchetError as error:
                problem = error
        else:
            # gathering is collective: each rank has to consume the iterator
            for _ in weights:
                pass
        # every rank raises what rank 0 met, so that none waits for the others
        problem = ranks.gathered(problem)[0]
        if problem is not None:
            raise problem
        return written

    def _broadcast(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        import torch

        from ratchet.rlhf.rollout.sglang_weights import SGLangLink
        from ratchet.rlhf.weights.broadcast import LinkLost

        try:
            link = event_loop.run(patiently(partial(SGLangLink.connect, self.servers)))
            try:
                sent = link.send(weights, getattr(torch, self.dtype))
                event_loop.run(link.finish())
            finally:
                event_loop.run(link.close())
        except (Away, LinkLost) as error:
            raise EngineLost(str(error)) from error
        return sent

    def _write(self, weights: Iterable[tuple[str, Tensor]], parent: Path) -> int:
        self._loads += 1
        folder = parent / f"weights-{self._loads}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        written = write_weights(weights, folder, "model")
        if self.model_folder is not None:
            for name in ("config.json", "generation_config.json"):
                if (self.model_folder / name).exists():
                    shutil.copy(self.model_folder / name, folder / name)

        async def load() -> None:
            await event_loop.gather([patiently(partial(self.api.load, server, folder)) for server in self.servers])

        try:
            event_loop.run(load())
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return written

    def place(self, *, model: bool, optimizer: bool) -> None:
        """Does nothing: servers have their own devices."""

    def close(self) -> None:
        """Closes the connections; the servers keep running."""
        self._servers.close()


def _continued(request: Request, sampling: Sampling, chunk: Chunk) -> Request:
    """Returns the request for the tokens that follow a chunk."""
    length = len(chunk.response_ids)
    return replace(
        request,
        prompt_ids=request.prompt_ids + chunk.response_ids,
        mask=request.mask + (1,) * length,
        max_tokens=limit_of(request, sampling) - length,
    )
