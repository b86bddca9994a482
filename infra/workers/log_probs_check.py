"""Compares the log-probs of inference servers with the trainer's, before a run trains on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.distributed import ranks
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rollout.engine import Request, Sampling
from ratchet.rlhf.rollout.server_engine import ServerRollout
from ratchet.rlhf.train.engine import InferenceEngine

PROBE_TOKENS = 32
"""Number of tokens that `check_log_probs` compares."""
ROUNDING = 1e-3
"""Nats below which a difference is ignored: for a near-certain token both kinds of log-probs are 0."""
SAME_MODEL = 0.5
"""Nats by which log-probs of the same model may differ on average; bfloat16 and quantized weights stay far below."""


def check_log_probs(
    rollout: ServerRollout, actor: InferenceEngine, prompt_ids: Sequence[int], sampling: Sampling
) -> None:
    """Checks that the log-probs of every server match the trainer's, on one response per server.

    Training needs the log-probs of the temperature-scaled logits before truncation. The kind of log-probs that a server
    returns is fixed when the server starts and cannot be queried, so the probe is sampled to expose the wrong kind.

    Raises:
        UserError: a server returns the wrong kind of log-probs, or those of another model.
        EngineLost: a server does not answer.
    """
    truncates = sampling.truncates
    # After a tiny `top_p` the log-prob of the drawn token is 0; at temperature 2, log-probs of unscaled logits differ
    # from those of scaled ones.
    if truncates:
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
                np.zeros_like(log_probs) if truncates else _log_probs(actor, batch, 1.0),
            )
        )
        if error > error_if_wrong_kind + ROUNDING or error > SAME_MODEL:
            raise UserError(
                f"the log-probs of {url} differ from the trainer's on the same {len(log_probs)} tokens (by {error:.3g} "
                f"nats on average): start `vllm serve` with --logprobs-mode {mode}, or SGLang without "
                "SGLANG_RETURN_ORIGINAL_LOGPROB, and with the model of model.path"
            )


def _log_probs(actor: InferenceEngine, batch: TrajectoryBatch, temperature: float) -> np.ndarray:
    tokens = sum(int(batch.lengths(name).sum()) for name in batch.columns)
    outputs = actor.infer(batch, ("log_probs",), temperature=temperature, micro_batch_tokens=tokens)
    return np.asarray(outputs["log_probs"].flatten().to_numpy(zero_copy_only=False))
