"""Measures what a teacher's most likely tokens are worth and take, with SmolLM2-135M-Instruct and half of its layers.

    python benchmarks/teacher.py [--model models/smollm2] [--tokens 24] [--steps 25] [--temperature 1] [--k 16 64]
        [--without-rest]

The teacher answers a few questions. The student has every second layer of the teacher, as it is, and after a few steps
toward the teacher on these answers. For each divergence and number of tokens k the gradient of all the student's
weights is compared with that of the sum over the whole vocabulary, which is computed from plain logits. The columns are
written as a run writes them. `ratchet model smollm2` makes the model.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from ratchet.infra.store.run_store import parquet_bytes
from ratchet.rlhf.algorithms.distillation import Distillation, Divergence
from ratchet.rlhf.batch import TrajectoryBatch, ragged
from ratchet.rlhf.models.token_outputs import NO_MASS, TokenOutputs

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write a sentence about the sea.",
    "How many days does a week have?",
    "Why is the sky blue?",
    "What do bees make?",
    "Say good morning in Spanish.",
    "What is 7 times 8?",
)
DIVERGENCES: tuple[Divergence, ...] = ("forward_kl", "reverse_kl", "jsd")
BETA = 0.5
Answer = tuple[list[int], list[int]]
"""The tokens of a prompt and of its response."""


def half_of(teacher: PreTrainedModel) -> PreTrainedModel:
    """Returns a student with every second layer of its teacher."""
    student = copy.deepcopy(teacher)
    layers = student.base_model.layers[::2]
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number
    student.base_model.layers = layers
    student.config.num_hidden_layers = len(layers)
    if hasattr(student.config, "layer_types"):
        student.config.layer_types = student.config.layer_types[::2]
    return student


@torch.no_grad()
def answers(model: PreTrainedModel, folder: Path, tokens: int, *, samples: bool) -> list[Answer]:
    """Answers each question, with the most likely tokens or by sampling."""
    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    torch.manual_seed(0)
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        ids = model.generate(
            torch.tensor([prompt]), do_sample=samples, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=tokens
        )
        found.append((list(prompt), ids[0, len(prompt) :].tolist()))
    return found


def outputs(
    module: TokenOutputs, prompt: list[int], response: list[int], top: Tensor | int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ids, their log-probs and the log of the rest's probability, of each token of the response."""
    names = ("log_probs", "topk_log_probs", "tail_log_probs")
    at = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
    ids = torch.tensor([prompt + response])
    found = module(ids, None, at, torch.tensor(response), temperature, names, None, None, None, top)
    chosen = found["topk_ids"].long() if isinstance(top, int) else top
    return chosen, found["topk_log_probs"], found["tail_log_probs"]


def over_vocabulary(kind: Divergence, student: Tensor, teacher: Tensor) -> Tensor:
    """Returns each token's divergence, given log-probs of all tokens."""
    p, q = teacher.exp(), student.exp()
    if kind == "forward_kl":
        return (p * (teacher - student)).sum(-1)
    if kind == "reverse_kl":
        return (q * (student - teacher)).sum(-1)
    mixture = (BETA * p + (1 - BETA) * q).log()
    return (BETA * p * (teacher - mixture) + (1 - BETA) * q * (student - mixture)).sum(-1)


def gradient(student: PreTrainedModel, losses: Iterator[Tensor]) -> Tensor:
    """Returns the gradient of a sum of losses, one after the other, of all weights."""
    student.zero_grad()
    for loss in losses:
        loss.backward()
    return torch.cat([weight.grad.flatten() for weight in student.parameters() if weight.grad is not None])


def log_probs(model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    """Returns the log-probs of all tokens at each token of the response."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def bytes_per_token(teacher: TokenOutputs, said: list[Answer], k: int, temperature: float) -> dict[str, float]:
    """Returns the size of each column in a file, per token of the responses."""
    columns: dict[str, list[np.ndarray]] = {"topk_ids": [], "topk_log_probs": [], "tail_log_probs": []}
    with torch.no_grad():
        for prompt, response in said:
            for values, found in zip(columns.values(), outputs(teacher, prompt, response, k, temperature), strict=True):
                values.append(found.flatten().numpy())
    lengths = np.array([len(response) for _, response in said])
    sizes = {}
    for name, values in columns.items():
        width = 1 if name == "tail_log_probs" else k
        flat = np.concatenate(values)
        column = ragged(flat.astype(np.int32 if name == "topk_ids" else np.float32), width * lengths)
        empty = TrajectoryBatch.of({f"teacher_{name}": column.slice(0, 0)})
        table = TrajectoryBatch.of({f"teacher_{name}": column})
        sizes[name] = (len(parquet_bytes(table.table)) - len(parquet_bytes(empty.table))) / lengths.sum()
    return sizes


def taught(
    student: PreTrainedModel, teacher: PreTrainedModel, said: list[Answer], steps: int, temperature: float
) -> None:
    """Takes steps of Adam toward the teacher, by the forward KL divergence over the vocabulary."""
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-4)
    with torch.no_grad():
        opinions = [log_probs(teacher, *one, temperature) for one in said]
    for _ in range(steps):
        pairs = zip(said, opinions, strict=True)
        losses = (over_vocabulary("forward_kl", log_probs(student, *one, temperature), its) for one, its in pairs)
        gradient(student, (loss.mean() for loss in losses))
        optimizer.step()


def compare(
    learner: TokenOutputs, teacher: TokenOutputs, said: list[Answer], ks: list[int], temperature: float, rest: bool
) -> None:
    """Prints the errors of the gradient, with or without the bucket of all tokens that are not the most likely."""
    student = learner.model
    for kind in DIVERGENCES:
        loss = Distillation(divergence=kind, beta=BETA)

        def over_top(k: int, loss: Distillation = loss) -> Iterator[Tensor]:
            for one in said:
                with torch.no_grad():
                    ids, of_teacher, its_tail = outputs(teacher, *one, k, temperature)
                _, top, tail = outputs(learner, *one, ids, temperature)
                if not rest:
                    tail = its_tail = torch.full_like(its_tail, NO_MASS)
                yield loss.of_tokens(top[None], tail[None], of_teacher[None], its_tail[None]).sum()

        def whole(kind: Divergence = kind) -> Iterator[Tensor]:
            for one in said:
                with torch.no_grad():
                    opinion = log_probs(teacher.model, *one, temperature)
                yield over_vocabulary(kind, log_probs(student, *one, temperature), opinion).sum()

        expected = gradient(student, whole())
        errors = {k: (gradient(student, over_top(k)) - expected).norm() / expected.norm() for k in ks}
        print(f"  {kind}: {', '.join(f'{error:.2%} at k = {k}' for k, error in errors.items())}", flush=True)


def main() -> None:
    """Prints the tables of docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--temperature", type=float, default=1.0, help="of the distributions that are compared")
    parser.add_argument("--k", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--without-rest", action="store_true", help="leave out the bucket of all other tokens")
    options = parser.parse_args()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(options.model)
    teacher = TokenOutputs(model, "policy")
    sizes = [sum(weight.numel() for weight in one.parameters()) / 1e6 for one in (half_of(model), model)]
    print(f"student: {sizes[0]:.0f} M of {sizes[1]:.0f} M weights")
    for samples in (False, True):
        said = answers(model, options.model, options.tokens, samples=samples)
        with torch.no_grad():
            tails = {
                k: torch.cat([outputs(teacher, *one, k, options.temperature)[2] for one in said]).exp().mean()
                for k in options.k
            }
        how = "sampled" if samples else "most likely"
        print(
            f"\n{how} answers, {sum(len(response) for _, response in said)} tokens; outside of the k tokens:", end=" "
        )
        print(", ".join(f"{tail:.2%} at k = {k}" for k, tail in tails.items()), flush=True)
        for k in options.k:
            of_columns = bytes_per_token(teacher, said, k, options.temperature)
            each = ", ".join(f"{name} {size:.1f}" for name, size in of_columns.items())
            print(f"  k = {k}: {sum(of_columns.values()):.0f} bytes a token ({each})", flush=True)
        student = half_of(model)
        learner = TokenOutputs(student, "policy")
        for steps in (0, options.steps):
            taught(student, model, said, steps, options.temperature)
            print(f" error of the gradient after {steps} steps", flush=True)
            compare(learner, teacher, said, options.k, options.temperature, not options.without_rest)


if __name__ == "__main__":
    main()
