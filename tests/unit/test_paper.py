"""The costs on paper: by hand for small numbers, and against what transformers and autograd really hold."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks import paper
from benchmarks.costs import ASSUMED, HARDWARE, MODELS, Lengths, Model
from benchmarks.paper import Setup
from ratchet.rlhf.weights import state_digest
from ratchet.rlhf.weights.tensor_shards import TensorShard

SMALL = Model("small", 256, 1024, 3, 4, 2, 128, tied=False, biased=True)
LENGTHS = Lengths(10, np.array([[4, 2], [3, 1]]))
H100 = HARDWARE["H100"]


def built(model: Model) -> PreTrainedModel:
    shape = {
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads,
        "vocab_size": model.vocabulary,
        "tie_word_embeddings": model.tied,
    }
    if model.biased:
        return Qwen2ForCausalLM(Qwen2Config(**shape))
    return LlamaForCausalLM(LlamaConfig(**shape))


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_parameters_of_their_configs(name: str) -> None:
    with torch.device("meta"):
        whole = built(MODELS[name])
    assert MODELS[name].parameters == sum(parameter.numel() for parameter in whole.parameters())


def test_flops_are_two_per_weight_and_four_per_pair_and_element_of_a_head() -> None:
    matrices = 256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 1024
    expected = 2 * 3 * matrices * 7 + 4 * 3 * 256 * 20 + 2 * 128 * 256 * 5
    assert SMALL.forward_flops(7, attended=20, predicted=5) == expected
    assert SMALL.key_value_bytes == 3 * 2 * 128 * 2


def test_a_shared_prompt_is_computed_once() -> None:
    """4 prompt tokens, and responses of 3 and 2, whose last tokens are predicted and not read."""
    setup = Setup(SMALL, H100, 1, Lengths(4, np.array([[3, 2]])))
    own = 2 * 4 + 2**2 / 2 + 1 * 4 + 1**2 / 2
    expected = SMALL.forward_flops(4 + 2 + 1, 4**2 / 2 + own, 5)
    assert paper.micro_batch_flops(setup, setup.lengths.responses).tolist() == [expected]


def test_activations_are_what_autograd_keeps() -> None:
    """To the byte, but for a float32 per token of each norm (2), and of each of attention's heads (4)."""
    kept = {(layers, tokens): saved(layers, tokens) for layers in (1, 3) for tokens in (96, 192)}
    per_token = (kept[3, 192] - kept[1, 192] - kept[3, 96] + kept[1, 96]) / 96 / 2
    one_layer = replace(SMALL, layers=1)
    assert per_token == one_layer.activation_bytes("none") + 4 * (2 + SMALL.heads)


def saved(layers: int, tokens: int) -> int:
    """Bytes that autograd keeps of a forward pass without a head."""
    model = built(replace(SMALL, layers=layers)).bfloat16()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    ids = torch.zeros((1, tokens), dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=ids, use_cache=False)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(size for pointer, size in storages.items() if pointer not in parameters)


def test_checkpointing_keeps_less() -> None:
    sizes = [SMALL.activation_bytes(kind) for kind in ("none", "selective", "full")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 3 * 2 * 256


def test_gathering_is_bounded_by_nvlink_in_a_node_and_by_nics_between_nodes() -> None:
    assert H100.gathering(450e9, 1) == 0
    assert H100.gathering(450e9, 8) == pytest.approx(7 / 8)
    assert H100.gathering(400e9, 16) == pytest.approx(7 / 8 * 400 / 450)  # half of it through 8 NICs takes 0.5 s
    slow = replace(H100, nic=10e9)
    assert slow.gathering(400e9, 16) == pytest.approx(2.5)


def test_lengths_by_hand() -> None:
    assert (LENGTHS.count, LENGTHS.tokens) == (4, 50)
    assert LENGTHS.attended_by_responses == (40 + 10) + (20 + 3) + (30 + 6) + (10 + 1)


def test_generation_reads_weights_at_each_step_and_every_key_once_per_token_after_it() -> None:
    setup = Setup(SMALL, H100, 2, LENGTHS)
    assert (setup.rollout_gpus, setup.engines) == (1, 2)
    read = 4 * 2 * SMALL.parameters + 120 / 2 * SMALL.key_value_bytes
    prefill = SMALL.forward_flops(10, 50, 1) / (H100.flops * ASSUMED.mfu)
    expected = read / (H100.hbm * ASSUMED.decode) + 4 * ASSUMED.step_s + prefill
    assert paper.generation(setup) == pytest.approx(expected)


def test_an_engine_spans_as_many_gpus_as_its_weights_need() -> None:
    spans = {name: Setup(model, H100, 64, LENGTHS).rollout_gpus for name, model in MODELS.items()}
    assert spans == {"0.5B": 1, "7B": 1, "32B": 2, "70B": 4}


def test_the_digest_moves_the_bytes_that_its_operations_read_and_write() -> None:
    """Counted from the operations that PyTorch dispatches, for two runs, so that steps within a run do not count."""
    from torch.utils._python_dispatch import TorchDispatchMode

    elements = 2**14
    moved = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
            nonlocal moved
            result = function(*arguments, **(options or {}))
            if not any(name in str(function) for name in ("view", "slice", "detach", "alias")):
                tensors = [tensor for tensor in (*arguments, result) if isinstance(tensor, Tensor)]
                moved += sum(tensor.nbytes for tensor in tensors if tensor.numel() == elements)
            return result

    part = TensorShard(torch.randn(2, elements // 2), torch.tensor([0, elements // 2]))
    with Counting():
        state_digest.sums(part, key=1)
    assert moved / elements == paper.DIGEST_BYTES


@pytest.mark.parametrize(("name", "gpus"), paper.SIZES)
def test_snapshots_follow_the_rule_of_the_driver(name: str, gpus: int) -> None:
    setup = Setup(MODELS[name], H100, gpus, Lengths.drawn(128, 8, 200, 2110, 8192))
    wait, written = paper.snapshot_wait(setup), paper.snapshot_written(setup)
    cheap = max(1, math.ceil(wait / (0.05 * 100)), math.ceil(written / 100))
    assert paper.snapshot_every(setup, iteration_s=100) == cheap
    assert paper.snapshot_every(setup, iteration_s=0.1) == 10, "checkpoint.max_replay"


def test_what_does_not_fit_is_said() -> None:
    lengths = Lengths.drawn(128, 8, 200, 2110, 8192)
    [line] = paper.misfits(Setup(MODELS["32B"], H100, 32, lengths))
    assert line.endswith("tokens with selective checkpointing: 103 GB + 30 GB of 80 GB; full checkpointing")
    assert paper.misfits(Setup(MODELS["0.5B"], H100, 1, lengths)) == []


def test_the_docs_have_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["paper.py"])
    paper.main()
    _, *blocks = capsys.readouterr().out.strip().split("\n\n")
    docs = (Path(paper.__file__).parents[1] / "docs/benchmarks.md").read_text()
    assert len(blocks) == 5
    for block in blocks:
        assert block in docs, "run benchmarks/paper.py, and copy what it prints to docs/benchmarks.md"
