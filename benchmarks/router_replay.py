"""Measures how far a trainer is from its rollout in bfloat16, with the rollout's experts and with its own.

    python benchmarks/router_replay.py [--layers 8] [--experts 32] [--chosen 4] [--tokens 64] [--seeds 3]

A mixture of experts with random weights, of Qwen3's architecture, answers random prompts by the engine `hf`, token by
token with a cache. The engine `torch` computes the log-probs of the same tokens with the same weights, whole sequences
at a time: only rounding differs. The column of routes is written as a run writes it.
"""

from __future__ import annotations

import argparse
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ratchet.infra.store.run_store import parquet_bytes
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.environments.dialogues import Dialogue
from ratchet.rlhf.models.routes import Routers
from ratchet.rlhf.rollout.engine import Chunk, Request, Sampling
from ratchet.rlhf.rollout.hf_engine import HFRollout
from ratchet.rlhf.schema import ROUTES, TRAJECTORY
from ratchet.rlhf.train.torch_engine import TorchEngine
from tests.streams import chunks_of

VOCABULARY, WIDTH, PROMPTS, ANSWERS = 512, 128, 8, 4


def mixture(options: argparse.Namespace, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=options.experts,
        num_experts_per_tok=options.chosen,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=1024,
    )
    model: PreTrainedModel = Qwen3MoeForCausalLM(config)
    with torch.no_grad():  # as large as those of a trained model, relative to its width
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=WIDTH**-0.5)
    return model


def answered(rollout: HFRollout, options: argparse.Namespace, seed: int) -> TrajectoryBatch:
    """Answers random prompts; returns trajectories with routes."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(map(int, rng.integers(2, VOCABULARY, int(rng.integers(16, 64))))) for _ in range(PROMPTS)]
    requests = [
        Request(f"p{number}-s{sample}", prompt) for number, prompt in enumerate(prompts) for sample in range(ANSWERS)
    ]
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=options.tokens, seed=seed, ignore_eos=True)
    dialogues = []
    for request, chunks in zip(requests, chunks_of(rollout, requests, sampling), strict=True):
        dialogue = Dialogue(request, turn_starts=[0])
        for chunk in chunks:
            assert isinstance(chunk, Chunk)
            dialogue.wrote(chunk, 0)
        dialogues.append(dialogue)
    return TrajectoryBatch.of(
        {
            "trajectory_id": [dialogue.request.trajectory_id for dialogue in dialogues],
            "prompt_ids": [dialogue.request.prompt_ids for dialogue in dialogues],
            "response_ids": [dialogue.ids for dialogue in dialogues],
            "rollout_log_probs": [dialogue.log_probs for dialogue in dialogues],
            ROUTES: pa.array([dialogue.routed_experts for dialogue in dialogues], TRAJECTORY[ROUTES].type),
        }
    )


def log_probs(trainer: TorchEngine, batch: TrajectoryBatch) -> np.ndarray:
    found = trainer.infer(batch, ("log_probs",), temperature=1.0, micro_batch_tokens=4096)["log_probs"]
    return np.asarray(found.flatten().to_numpy())


@torch.no_grad()
def moved(model: PreTrainedModel, batch: TrajectoryBatch) -> tuple[float, float]:
    """Returns the share of tokens and layers that go to other experts in a plain pass, and of tokens with such a
    layer."""
    routers, places = Routers.of(model), []
    for prompt, response, cell in zip(
        batch.list("prompt_ids"), batch.list("response_ids"), batch.list(ROUTES), strict=True
    ):
        with routers.recording() as recorded:
            model(input_ids=torch.tensor([[*prompt, *response[:-1]]]), use_cache=False)
        own = torch.stack([choice for [choice] in recorded], dim=1).sort(-1).values
        given = torch.tensor(cell).view(own.shape).sort(-1).values
        places.append((own != given).any(-1))
    moved = torch.cat(places)
    return float(moved.float().mean()), float(moved.any(-1).float().mean())


def stored(batch: TrajectoryBatch) -> float:
    """Returns the bytes of the column in a file, per token, layer and expert."""
    data = parquet_bytes(batch.table.select([ROUTES]))
    column = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(0)
    return float(column.total_compressed_size / len(batch.flat(ROUTES)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--chosen", type=int, default=4, help="experts of a token")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response")
    parser.add_argument("--seeds", type=int, default=3, help="models")
    options = parser.parse_args()
    print("experts | seed | KL in nats | mean difference of log-probs | largest")
    for seed in range(options.seeds):
        trainer = TorchEngine(mixture(options, seed), "policy", dtype="bfloat16", follows_routes=True)
        rollout = HFRollout(trainer.model, eos_token_ids=(1,), dtype="bfloat16", records_routes=True)
        batch = answered(rollout, options, seed)
        rollout.close()
        drawn = batch.flat("rollout_log_probs").astype(np.float64)
        for name, seen in (("own", batch.without(ROUTES)), ("the rollout's", batch)):
            difference = log_probs(trainer, seen).astype(np.float64) - drawn
            kl = (np.expm1(difference) - difference).mean()
            print(f"{name} | {seed} | {kl:.2e} | {np.abs(difference).mean():.4f} | {np.abs(difference).max():.2f}")
        layers, tokens = moved(trainer.model, batch)
        print(
            f"{len(batch.flat(ROUTES)) // options.layers // options.chosen} tokens, of which a plain pass sends "
            f"{tokens:.1%} to other experts in some layer ({layers:.2%} of tokens and layers); "
            f"{stored(batch):.3f} bytes per token, layer and expert"
        )


if __name__ == "__main__":
    main()
