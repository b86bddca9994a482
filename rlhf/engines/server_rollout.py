"""`rollout.engine: server`: generation by servers that exchange token ids over HTTP.

The servers are started separately and keep running when a run ends. New weights are written to a folder that the
servers can read, and each server is asked to load them.
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
"""Maximum number of concurrent requests per server."""
TRIES = 5


class Away(Exception):
    """A server did not answer, or reported that it is unavailable."""


class Api(Protocol):
    """The HTTP interface of one kind of server."""

    def generate(self, ask: Ask, request: Request, sampling: Sampling, seed: int, eos: Sequence[int]) -> Generation:
        """Generate one response.

        Args:
            ask: the server.
            request: the trajectory to generate.
            sampling: how to sample tokens.
            seed: seed of the request, a non-negative int64.
            eos: end-of-sequence tokens.

        Returns:
            The response.

        Raises:
            Away: the server does not answer or is unavailable.
            UserError: the server refuses the request.
        """
        ...

    def load(self, ask: Ask, folder: Path) -> None:
        """Load the weights in a folder.

        Args:
            ask: the server.
            folder: safetensors files and the model's config.

        Raises:
            Away: the server does not answer or is unavailable.
            UserError: the server cannot load weights.
        """
        ...


@dataclass(frozen=True)
class Ask:
    """A server that answers HTTP requests."""

    client: httpx.Client
    url: str

    def __call__(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request.

        Args:
            path: path of the URL.
            body: JSON to POST; None: GET.

        Returns:
            The answer's JSON; None if the answer is not JSON.

        Raises:
            Away: the server does not answer, or answers 429 or 5xx.
            UserError: the server answers another 4xx.
        """
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
    """`vllm serve` (OpenAI-compatible completions, as of 0.32)."""

    def __init__(self) -> None:
        self.models: dict[str, str] = {}

    def generate(self, ask: Ask, request: Request, sampling: Sampling, seed: int, eos: Sequence[int]) -> Generation:
        """Generate one response; see `Api.generate`."""
        if ask.url not in self.models:
            self.models[ask.url] = ask("/v1/models")["data"][0]["id"]
        body = {
            "model": self.models[ask.url],
            "prompt": list(request.prompt_ids),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.temperature else 1.0,
            "max_tokens": limit_of(request, sampling),
            "seed": seed,
            # explicitly neutral, since defaults from the model's generation_config.json would change the sampling
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,  # of the sampled token
            "return_token_ids": True,
            "ignore_eos": True,  # stop_token_ids has all end-of-sequence tokens
            "stop_token_ids": [] if sampling.ignore_eos else list(eos),
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
        [choice] = ask("/v1/completions", body)["choices"]
        reason = "stop" if choice["finish_reason"] == "stop" else "length"
        return Generation(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]), reason)

    def load(self, ask: Ask, folder: Path) -> None:
        """Load the weights in a folder; see `Api.load`."""
        try:
            ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            ask("/reset_prefix_cache", {})
        except UserError as error:
            raise UserError(
                f"{ask.url} cannot load new weights ({error}): start `vllm serve` with VLLM_SERVER_DEV_MODE=1, and let "
                f"it read {folder.parent}"
            ) from None


class SGLangApi:
    """SGLang's `/generate` and `/update_weights_from_disk`, written from its documentation; never run."""

    def generate(self, ask: Ask, request: Request, sampling: Sampling, seed: int, eos: Sequence[int]) -> Generation:
        """Generate one response; see `Api.generate`."""
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
        """Load the weights in a folder; see `Api.load`."""
        answer = ask("/update_weights_from_disk", {"model_path": str(folder), "flush_cache": True})
        if not answer["success"]:
            raise UserError(f"{ask.url} cannot load new weights: {answer['message']}")


class TGIApi:
    """Text Generation Inference's `/generate` (3.x), written from its documentation; never run.

    It takes the prompt as text, which its tokenizer may turn into different tokens, and cannot load new weights: use it
    for evaluation only.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Use `tokenizer` to turn prompts into text; None: generating is impossible."""
        self.tokenizer = tokenizer

    def generate(self, ask: Ask, request: Request, sampling: Sampling, seed: int, eos: Sequence[int]) -> Generation:
        """Generate one response; see `Api.generate`."""
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
        if sampling.top_p < 1:  # the server refuses 1
            parameters["top_p"] = sampling.top_p
        text = self.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
        answer = ask("/generate", {"inputs": text, "parameters": parameters})
        details = (answer[0] if isinstance(answer, list) else answer)["details"]
        reason = "length" if details["finish_reason"] == "length" else "stop"
        tokens = [(int(token["id"]), float(token["logprob"])) for token in details["tokens"]]
        return Generation(tuple(token for token, _ in tokens), tuple(log_prob for _, log_prob in tokens), reason)

    def load(self, ask: Ask, folder: Path) -> None:
        """Raise `UserError`: this server cannot load new weights."""
        raise UserError(f"{ask.url} (rollout.server.api tgi) cannot load new weights: use it for evaluation only")


APIS: dict[str, Callable[[PreTrainedTokenizerBase | None], Api]] = {
    "vllm": lambda _: VLLMApi(),
    "sglang": lambda _: SGLangApi(),
    "tgi": TGIApi,
}

PROBE_TOKENS = 32
"""Number of tokens that `check_log_probs` compares."""


def check_log_probs(
    rollout: ServerRollout, actor: InferenceEngine, prompt_ids: Sequence[int], sampling: Sampling
) -> None:
    """Check that the log-probs of every server match the trainer's, on one response per server.

    Training needs the log-probs of the temperature-scaled logits before `top_p`. The kind of log-probs that a server
    returns is fixed when the server starts and cannot be queried. The probe is therefore sampled so that the wrong kind
    stands out: at temperature 2 if `sampling` has a temperature other than 1, and with a tiny `top_p` (the log-prob
    after `top_p` is then 0) if `sampling` has a `top_p` below 1.

    Args:
        rollout: the servers.
        actor: the trainer's model.
        prompt_ids: tokens of the probe's prompt.
        sampling: how the run samples tokens.

    Raises:
        UserError: a server returns the wrong kind of log-probs, or those of another model.
        EngineLost: a server does not answer.
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
        log_probs = np.array(answer.log_probs)
        error, error_if_wrong_kind = (
            np.abs(log_probs - expected).mean()
            for expected in (
                _log_probs(actor, batch, sampling.temperature),
                np.zeros_like(log_probs) if sampling.top_p < 1 else _log_probs(actor, batch, 1.0),
            )
        )
        if error > error_if_wrong_kind + ROUNDING or error > SAME_MODEL:
            raise UserError(
                f"the log-probs of {url} differ from the trainer's on the same {len(log_probs)} tokens (by {error:.3g} "
                f"nats on average): start `vllm serve` with --logprobs-mode {mode} (or configure another server to "
                "return the same kind), and with the model of model.path"
            )


ROUNDING = 1e-3
"""Nats below which a difference is ignored: for a near-certain token both kinds of log-probs are 0."""
SAME_MODEL = 0.5
"""Nats by which log-probs of the same model may differ on average; bfloat16 and quantized weights stay far below."""


def _log_probs(actor: InferenceEngine, batch: TrajectoryBatch, temperature: float) -> np.ndarray:
    tokens = sum(int(batch.lengths(name).sum()) for name in batch.columns)
    outputs = actor.infer(batch, ("log_probs",), temperature=temperature, micro_batch_tokens=tokens)
    return np.asarray(outputs["log_probs"].flatten().to_numpy(zero_copy_only=False))


class ServerRollout:
    """A rollout engine that distributes requests over servers."""

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
        """Connect to servers; no request is sent yet.

        Args:
            urls: base URLs of the servers.
            api: kind of the servers.
            eos_token_ids: tokens that end a response.
            timeout_s: time limit of a request, in seconds.
            weights_folder: folder for new weights, at the same path on the servers; None: weights are never changed.
            model_folder: folder with the model's config, which some servers need next to new weights.
            tokenizer: only needed for `tgi`, which takes prompts as text.
        """
        self.api = APIS[api](tokenizer)
        self.eos, self.weights_folder, self.model_folder = eos_token_ids, weights_folder, model_folder
        self.client = httpx.Client(timeout=timeout_s, limits=httpx.Limits(max_connections=AT_ONCE * len(urls)))
        self.servers = [Ask(self.client, url.rstrip("/")) for url in urls]
        self._busy = dict.fromkeys(range(len(urls)), 0)
        self._away = dict.fromkeys(range(len(urls)), 0)
        self._lock = threading.Lock()
        self._loads = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Generation]:
        """Generate responses; see `RolloutEngine.generate`."""
        if not requests:
            return []
        with ThreadPoolExecutor(min(len(requests), AT_ONCE * len(self.servers))) as pool:
            return list(pool.map(lambda request: self._generate_one(request, sampling), requests))

    def from_each(self, request: Request, sampling: Sampling) -> dict[str, Generation]:
        """Send the same request to every server.

        Args:
            request: the trajectory to generate.
            sampling: how to sample tokens.

        Returns:
            The response of each server, by URL.

        Raises:
            EngineLost: a server does not answer.
        """
        seed = seed_of(request, sampling)
        return {
            server.url: self._patiently(
                lambda server=server: self.api.generate(server, request, sampling, seed, self.eos)
            )
            for server in self.servers
        }

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], adapter_config: bytes | None = None) -> None:
        """Replace the weights of all servers; see `RolloutEngine.load_weights`."""
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
        """Do nothing: servers have their own devices."""

    def close(self) -> None:
        """Close the connections; the servers keep running."""
        self.client.close()

    def _generate_one(self, request: Request, sampling: Sampling) -> Generation:
        seed = seed_of(request, sampling)

        def attempt() -> Generation:
            with self._least_busy(len(request.prompt_ids) + limit_of(request, sampling)) as server:
                return self.api.generate(server, request, sampling, seed, self.eos)

        generation: Generation = self._patiently(attempt)
        return generation

    def _patiently(self, attempt: Any) -> Any:
        """Retry while a server is away; `attempt` may choose another server each time."""
        try:
            for retry in Retrying(
                retry=retry_if_exception_type(Away),
                stop=stop_after_attempt(TRIES),
                wait=wait_random_exponential(multiplier=0.2, max=10),
            ):
                with retry:
                    return attempt()
        except RetryError as error:
            raise EngineLost(str(error.last_attempt.exception())) from None

    @contextmanager
    def _least_busy(self, tokens: int) -> Iterator[Ask]:
        """Yield the server with the fewest pending tokens; servers that failed come last until they answer again."""
        with self._lock:
            number = min(self._busy, key=lambda server: (self._away[server], self._busy[server]))
            self._busy[number] += tokens
        try:
            yield self.servers[number]
        except Away:
            with self._lock:
                self._away[number] += 1
            raise
        else:
            with self._lock:
                self._away[number] = 0
        finally:
            with self._lock:
                self._busy[number] -= tokens
