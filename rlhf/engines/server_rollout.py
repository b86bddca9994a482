"""`rollout.engine: server`: generation by servers that take and give token ids over HTTP.

They were started by others, and stay when a run ends. New weights are written to a folder that the servers see, and
each is told to load them.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import httpx
import numpy as np
from tenacity import RetryError, Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from rlhf.batch import TrajectoryBatch
from rlhf.engines import ranks
from rlhf.engines.base import Generation, Request, Sampling, limit_of, seed_of
from rlhf.engines.weight_files import write_weights
from rlhf.errors import EngineLost, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlhf.engines.base import InferenceEngine

AT_ONCE = 64
"""Requests that a server is asked at the same time."""
TRIES = 5


class Away(Exception):
    """A server did not answer, or said that it cannot now."""


class Api(Protocol):
    """How one kind of server is asked."""

    def generate(self, ask: Ask, request: Request, sampling: Sampling, seed: int, eos: Sequence[int]) -> Generation: ...

    def load(self, ask: Ask, folder: Path) -> None:
        """Take over the weights in a folder. Raises `UserError` where a server cannot."""
        ...


@dataclass(frozen=True)
class Ask:
    """One server."""

    client: httpx.Client
    url: str

    def __call__(self, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            answer = self.client.get(self.url + path) if body is None else self.client.post(self.url + path, json=body)
        except httpx.TransportError as error:
            raise Away(f"{self.url} does not answer: {type(error).__name__} {error}") from None
        if answer.status_code >= 500 or answer.status_code == 429:
            raise Away(f"{self.url}{path} answered {answer.status_code}: {answer.text[:200]}")
        if answer.status_code >= 400:
            raise UserError(f"{self.url}{path} answered {answer.status_code}: {answer.text[:300]}")
        return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else None


class VLLMApi:
    """`vllm serve` (its OpenAI-compatible completions, as of 0.32)."""

    def __init__(self) -> None:
        self.models: dict[str, str] = {}

    def generate(self, ask: Ask, request: Request, sampling: Sampling, seed: int, eos: Sequence[int]) -> Generation:
        if ask.url not in self.models:
            self.models[ask.url] = ask("/v1/models")["data"][0]["id"]
        body = {
            "model": self.models[ask.url],
            "prompt": list(request.prompt_ids),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.temperature else 1.0,
            "max_tokens": limit_of(request, sampling),
            "seed": seed,
            # neutral, and said: else those of the model's generation_config.json would change what is drawn
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,  # of the sampled token
            "return_token_ids": True,
            "ignore_eos": True,  # ours are all of them
            "stop_token_ids": [] if sampling.ignore_eos else list(eos),
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
        [choice] = ask("/v1/completions", body)["choices"]
        reason = "stop" if choice["finish_reason"] == "stop" else "length"
        return Generation(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]), reason)

    def load(self, ask: Ask, folder: Path) -> None:
        try:
            ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            ask("/reset_prefix_cache", {})
        except UserError as error:
            raise UserError(
                f"{ask.url} takes no new weights ({error}): start `vllm serve` with VLLM_SERVER_DEV_MODE=1, and let "
                f"it see {folder.parent}"
            ) from None


class SGLangApi:
    """SGLang's `/generate` and `/update_weights_from_disk`, written from its documentation; never run."""

    def generate(self, ask: Ask, request: Request, sampling: Sampling, seed: int, eos: Sequence[int]) -> Generation:
        body = {
            "input_ids": list(request.prompt_ids),
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p if sampling.temperature else 1.0,
                "max_new_tokens": limit_of(request, sampling),
                "sampling_seed": seed % 2**31,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "ignore_eos": True,
                "stop_token_ids": [] if sampling.ignore_eos else list(eos),
                "stop": list(sampling.stop),
                "no_stop_trim": True,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
        }
        meta = ask("/generate", body)["meta_info"]
        pairs = [(int(token), float(log_prob)) for log_prob, token, *_ in meta["output_token_logprobs"]]
        reason = "stop" if meta["finish_reason"]["type"] == "stop" else "length"
        return Generation(tuple(token for token, _ in pairs), tuple(log_prob for _, log_prob in pairs), reason)

    def load(self, ask: Ask, folder: Path) -> None:
        answer = ask("/update_weights_from_disk", {"model_path": str(folder), "flush_cache": True})
        if not answer["success"]:
            raise UserError(f"{ask.url} takes no new weights: {answer['message']}")


class TGIApi:
    """Text Generation Inference's `/generate` (3.x), written from its documentation; never run. It takes the prompt as
    text, which its tokenizer may read as other tokens, and takes no new weights: for evaluation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer

    def generate(self, ask: Ask, request: Request, sampling: Sampling, seed: int, eos: Sequence[int]) -> Generation:
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
        if sampling.top_p < 1:  # 1 is refused
            parameters["top_p"] = sampling.top_p
        text = self.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
        answer = ask("/generate", {"inputs": text, "parameters": parameters})
        details = (answer[0] if isinstance(answer, list) else answer)["details"]
        reason = "length" if details["finish_reason"] == "length" else "stop"
        tokens = [(int(token["id"]), float(token["logprob"])) for token in details["tokens"]]
        return Generation(tuple(token for token, _ in tokens), tuple(log_prob for _, log_prob in tokens), reason)

    def load(self, ask: Ask, folder: Path) -> None:
        raise UserError(f"{ask.url} (rollout.server.api tgi) takes no new weights: it can only evaluate")


APIS: dict[str, Callable[[PreTrainedTokenizerBase | None], Api]] = {
    "vllm": lambda _: VLLMApi(),
    "sglang": lambda _: SGLangApi(),
    "tgi": TGIApi,
}

PROBE_TOKENS = 32


def check_log_probs(
    rollout: ServerRollout, actor: InferenceEngine, prompt_ids: Sequence[int], sampling: Sampling
) -> None:
    """Ask every server for one answer, and compare its log-probs with the trainer's.

    Training needs the log-probs of the temperature-scaled logits before `top_p`. Which ones a server gives is decided
    when it is started, and cannot be asked for. The answer is therefore drawn in a way that makes the wrong ones stand
    out: at temperature 2 if the temperature matters, and from the likeliest token alone (whose log-prob after `top_p`
    is 0) if `top_p` does.

    Raises:
        UserError: a server's log-probs are others, or those of another model.
    """
    if sampling.top_p < 1:
        sampling, mode = replace(sampling, temperature=1.0, top_p=1e-6), "raw_logprobs"
    else:
        sampling, mode = replace(sampling, temperature=1.0 if sampling.temperature == 1 else 2.0), "processed_logprobs"
    sampling = replace(sampling, max_tokens=min(PROBE_TOKENS, sampling.max_tokens), ignore_eos=True, stop=())
    request = Request("log-probs-probe", tuple(prompt_ids))
    answers = ranks.gathered(rollout.from_each(request, sampling) if ranks.rank() == 0 else {})[0]
    for url, answer in answers.items():
        batch = TrajectoryBatch.of({"prompt_ids": [request.prompt_ids], "response_ids": [answer.response_ids]})
        given = np.array(answer.log_probs)
        here, others = (
            np.abs(given - expected).mean()
            for expected in (
                _log_probs(actor, batch, sampling.temperature),
                np.zeros_like(given) if sampling.top_p < 1 else _log_probs(actor, batch, 1.0),
            )
        )
        if here > others + ROUNDING or here > SAME_MODEL:
            raise UserError(
                f"the log-probs of {url} are not those that the trainer gives the same {len(given)} tokens (they "
                f"differ by {here:.3g} nats on average): start `vllm serve` with --logprobs-mode {mode} (or another "
                "server so that it gives the same), and with the model of model.path"
            )


ROUNDING = 1e-3
"""Nats that say nothing: a policy may be so sure of a token that both kinds are 0."""
SAME_MODEL = 0.5
"""Nats by which log-probs of the same model may differ on average: bfloat16 and quantized weights stay far below."""


def _log_probs(actor: InferenceEngine, batch: TrajectoryBatch, temperature: float) -> np.ndarray:
    tokens = sum(int(batch.lengths(name).sum()) for name in batch.columns)
    found = actor.infer(batch, ("log_probs",), temperature=temperature, micro_batch_tokens=tokens)
    return np.asarray(found["log_probs"].flatten().to_numpy(zero_copy_only=False))


class ServerRollout:
    def __init__(
        self,
        urls: Sequence[str],
        *,
        api: Literal["vllm", "sglang", "tgi"] = "vllm",
        eos_token_ids: tuple[int, ...],
        timeout_s: float = 600.0,
        weights_folder: Path | None = None,
        model_folder: Path | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """`weights_folder`: seen by the servers under the same name; None: they keep the weights that they have.
        `model_folder`: of the model's config, which some servers want beside new weights."""
        self.api = APIS[api](tokenizer)
        self.eos, self.weights_folder, self.model_folder = eos_token_ids, weights_folder, model_folder
        self.client = httpx.Client(timeout=timeout_s, limits=httpx.Limits(max_connections=AT_ONCE * len(urls)))
        self.servers = [Ask(self.client, url.rstrip("/")) for url in urls]
        self._busy = dict.fromkeys(range(len(urls)), 0)
        self._away = dict.fromkeys(range(len(urls)), 0)
        self._lock = threading.Lock()
        self._loads = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Generation]:
        if not requests:
            return []
        with ThreadPoolExecutor(min(len(requests), AT_ONCE * len(self.servers))) as pool:
            return list(pool.map(lambda request: self._generate_one(request, sampling), requests))

    def from_each(self, request: Request, sampling: Sampling) -> dict[str, Generation]:
        """What every server answers to a request, by its URL."""
        seed = seed_of(request, sampling)
        return {
            server.url: self._patiently(
                lambda server=server: self.api.generate(server, request, sampling, seed, self.eos)
            )
            for server in self.servers
        }

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], adapter_config: bytes | None = None) -> None:
        assert self.weights_folder is not None, "a run that trains has one"
        assert adapter_config is None, "the config refuses adapters"
        self._loads += 1
        folder = self.weights_folder / f"weights-{self._loads}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_weights(weights, folder, "model")
        if self.model_folder is not None:
            for name in ("config.json", "generation_config.json"):
                if (self.model_folder / name).exists():
                    shutil.copy(self.model_folder / name, folder / name)
        try:
            for server in self.servers:
                self._patiently(lambda server=server: self.api.load(server, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def place(self, *, model: bool, optimizer: bool) -> None:
        """Servers have devices of their own."""

    def close(self) -> None:
        self.client.close()

    def _generate_one(self, request: Request, sampling: Sampling) -> Generation:
        seed = seed_of(request, sampling)

        def attempt() -> Generation:
            with self._least_busy(len(request.prompt_ids) + limit_of(request, sampling)) as server:
                return self.api.generate(server, request, sampling, seed, self.eos)

        found: Generation = self._patiently(attempt)
        return found

    def _patiently(self, attempt: Any) -> Any:
        """Tried again, perhaps with another server, while a server is away."""
        try:
            for each in Retrying(
                retry=retry_if_exception_type(Away),
                stop=stop_after_attempt(TRIES),
                wait=wait_random_exponential(multiplier=0.2, max=10),
            ):
                with each:
                    return attempt()
        except RetryError as error:
            raise EngineLost(str(error.last_attempt.exception())) from None

    @contextmanager
    def _least_busy(self, tokens: int) -> Iterator[Ask]:
        """The server with the fewest tokens to come; one that has just failed is asked last, until it answers again."""
        with self._lock:
            number = min(self._busy, key=lambda each: (self._away[each], self._busy[each]))
            self._busy[number] += tokens
        try:
            yield self.servers[number]
        except Away:
            self._away[number] += 1
            raise
        else:
            self._away[number] = 0
        finally:
            with self._lock:
                self._busy[number] -= tokens
