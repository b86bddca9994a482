"""One model computed by two processes: from the same batch to the same weights, whatever the engine.

Each layout adds in another order, so a float32 gradient differs by some roundings; `assert_same_update` says how much
of that AdamW makes a step of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ratchet.rlhf.algorithms.objectives import ActorObjective
from ratchet.rlhf.algorithms.policy_losses import KLCov
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import ModelConfig, RewardModelConfig
from ratchet.rlhf.data.formats import Chat
from ratchet.rlhf.errors import NotFinite, UserError
from ratchet.rlhf.models.loading import load_actor, load_reward_model
from ratchet.rlhf.models.tokenizers import load_tokenizer
from ratchet.rlhf.train.engine import InferencePlan, OptimizerPlan, TrainEngine
from ratchet.rlhf.train.model_engine import ModelEngine, float32_model
from ratchet.rlhf.train.reward_engine import RewardEngine
from ratchet.rlhf.weights.stored_state import StoredState
from tests import tiny
from tests.contract.test_train_engines import (
    ENGINES,
    OF_TRANSFORMERS,
    PLAN,
    TOP,
    Aborts,
    Head,
    Kind,
    assert_close,
    assert_same_update,
    distilling,
    folder_of,
    infer,
    kind_of,
    taught,
)
from tests.ranks import Ranks, in_another_process, only_rank
from tests.tiers import sampled
from tests.tiny import moe_folder

pytestmark = sampled(8)

Files = dict[str, bytes]

DEALT = replace(PLAN, micro_batch_tokens=20, mini_batches=((0, 2, 4, 6, 1, 3, 5), (7,)))
"""Of the first mini-batch each rank has several pieces, of the second one rank has none."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


@pytest.fixture(params=[(engine, head) for engine in ENGINES for head in ("policy", "value")], ids="-".join)
def kind(request: pytest.FixtureRequest, policy_folder: Path, critic_folder: Path) -> Kind:
    engine, head = request.param
    return kind_of(engine, head, policy_folder, critic_folder)


@pytest.fixture(
    params=[(engine, mixture) for engine in OF_TRANSFORMERS for mixture in ("qwen3_moe", "mixtral")], ids="-".join
)
def mixture(request: pytest.FixtureRequest, mixtures: dict[str, Path]) -> Kind:
    engine, name = request.param
    return kind_of(engine, "policy", mixtures[name], mixtures[name])


@pytest.fixture
def one(kind: Kind) -> TrainEngine:
    """Plain PyTorch in one process."""
    return ENGINES["torch"](kind.folder, kind.head)


# What the ranks run.


def run(
    kind: Kind,
    batch: TrajectoryBatch,
    options: dict[str, Any],
    load: Files | None = None,
    plan: OptimizerPlan = DEALT,
    engine: TrainEngine | None = None,
) -> dict[str, Any]:
    """Ask, update, and tell everything."""
    engine = engine or kind.build(**options)
    if load is not None:
        engine.load_state(StoredState.of(load))
    began = engine.digest()
    outputs = infer(engine, kind, batch)
    metrics = engine.update(batch, kind.objective, plan)
    return {"began": began, "outputs": outputs, "metrics": metrics, "digest": engine.digest(), "files": engine.state()}


def run_judges(outcome: Path, process: Path) -> Any:
    """Five conversations: of one piece, and of several; and what a process reward says of their steps."""
    found: list[Any] = []
    said = [(Chat([{"role": "user", "content": "ask " * row}]), f"{row} so. it is. {'x' * row}") for row in range(5)]
    for folder, kind in ((outcome, "outcome"), (process, "process")):
        config = RewardModelConfig(path=str(folder), dtype="float32", kind=kind)
        engine = RewardEngine(load_reward_model(config), load_tokenizer(config))
        for budget in (60, 1000):
            if kind == "outcome":
                found.append(engine.scores(said, micro_batch_tokens=budget))
            else:
                steps = engine.steps(said, ".", micro_batch_tokens=budget)
                found.append([[step.score for step in each] for each in steps])
    return found


def run_few(kind: Kind, batch: TrajectoryBatch) -> Any:
    """One trajectory: a rank has none."""
    engine = kind.build()
    return infer(engine, kind, batch.take([3])), infer(engine, kind, batch.take([0, 3, 5]))


def run_spoiled(kind: Kind, batch: TrajectoryBatch, options: dict[str, Any]) -> tuple[str, str]:
    engine = kind.build(**options)
    before, digest = engine.state(), engine.digest()
    gathered: dict[str, bytes] = {}
    from ratchet.rlhf.distributed import ranks

    for part in ranks.gathered(before):
        gathered |= part
    with pytest.raises(NotFinite):
        engine.update(batch, kind.objective, DEALT)
    engine.load_state(StoredState.of(gathered))
    return digest, engine.digest()


# What comes of it.


def together(told: list[dict[str, Any]]) -> Files:
    """The files of all ranks; every file is one rank's."""
    names = [name for rank in told for name in rank["files"]]
    assert len(names) == len(set(names))
    assert all(any(name.startswith("model-") for name in rank["files"]) for rank in told), "each writes its share"
    return {name: data for rank in told for name, data in rank["files"].items()}


def test_two_processes_do_what_one_does(
    kind: Kind, one: TrainEngine, batch: TrajectoryBatch, ranks: Ranks, tmp_path: Path
) -> None:
    assert_two_do_what_one_does(kind, one, batch, ranks, tmp_path)


def test_two_processes_train_a_mixture_of_experts(
    mixture: Kind, batch: TrajectoryBatch, ranks: Ranks, tmp_path: Path
) -> None:
    one = ENGINES["torch"](mixture.folder, "policy")
    assert isinstance(one, ModelEngine)
    for weights, _ in ranks(run_weights, mixture, "float32"):
        expected = dict(one.weights())
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], tensor.cpu()) for name, tensor in expected.items())
    files = assert_two_do_what_one_does(mixture, one, batch, ranks, tmp_path)
    experts = {name for name in StoredState.of(files).weights if ".experts." in name}
    assert len(experts) == 2 * 4 * 3, "each matrix of each expert of each layer is a tensor"
    loaded = ENGINES["torch"](mixture.folder, "policy")
    loaded.load_state(StoredState.of(files))
    assert ranks(run, mixture, batch, {}, files)[0]["began"] == loaded.digest(), "two go on from it, too"


BALANCED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        *((engine, {}) for engine in OF_TRANSFORMERS),
        ("torch", {"sequence_parallel": 2, "packing": True}),
        ("fsdp", {"sequence_parallel": 2, "gradient_checkpointing": True}),
        ("zero3", {"gradient_checkpointing": True}),
    ],
)
def test_two_processes_balance_the_experts(
    engine: str, options: dict[str, Any], batch: TrajectoryBatch, ranks: Ranks, tmp_path: Path
) -> None:
    """The loss is that of a micro-batch, so each trajectory is one: then all layouts have the same."""
    folder = tiny.moe_folder(tmp_path, "qwen3_moe", **BALANCED)
    kind, alone = kind_of(engine, "policy", folder, folder), replace(DEALT, micro_batch_tokens=1)
    one = ENGINES["torch"](folder, "policy")
    expected = one.update(batch, kind.objective, alone)
    assert expected["actor/router_aux_loss"] > 1
    told = ranks(run, kind, batch, options, None, alone)
    assert told[0]["metrics"] == told[1]["metrics"] == pytest.approx(expected, rel=2e-3, abs=1e-4)
    loaded = ENGINES["torch"](folder, "policy")
    loaded.load_state(StoredState.of(together(told)))
    assert_same_update(loaded, one)


@pytest.mark.parametrize("options", [{}, {"tensor_parallel": 2}], ids=str)
def test_two_processes_pick_the_tokens_that_one_picks(
    options: dict[str, Any], policy_folder: Path, batch: TrajectoryBatch, ranks: Ranks
) -> None:
    loss = KLCov(kl_cov_ratio=0.2, ppo_kl_coef=50)
    objective = ActorObjective(loss, None, "k1", 0.0, on_policy=False)
    expected = ENGINES["torch"](policy_folder, "policy").update(batch, objective, DEALT)
    told = ranks(run, Kind("fsdp", "policy", policy_folder, objective, ("log_probs",), "advantages"), batch, options)
    assert told[0]["metrics"] == told[1]["metrics"] == pytest.approx(expected, rel=2e-3, abs=1e-4)


def run_taught(kind: Kind, batch: TrajectoryBatch, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model as a teacher, and what it learns from one."""
    names = ("topk_ids", "topk_log_probs", "tail_log_probs")
    engine = kind.build(**options)
    found = engine.infer(batch, names, temperature=0.7, micro_batch_tokens=20, top_k=TOP)
    told = run(kind, batch, options, engine=engine)
    return {name: column.to_pylist() for name, column in found.items()}, told


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        *((engine, {}) for engine in OF_TRANSFORMERS),
        ("torch", {"sequence_parallel": 2, "packing": True}),
        ("fsdp", {"sequence_parallel": 2, "packing": False}),
    ],
    ids=str,
)
def test_two_processes_learn_from_a_teacher(
    engine: str, options: dict[str, Any], policy_folder: Path, batch: TrajectoryBatch, ranks: Ranks
) -> None:
    kind = replace(kind_of(engine, "policy", policy_folder, policy_folder), objective=distilling("jsd"))
    batch = taught(batch)
    expected, one = run_taught(replace(kind, engine="torch"), batch, {})
    (teacher, told), (others, theirs) = ranks(run_taught, kind, batch, options)
    assert teacher == others and told["metrics"] == theirs["metrics"] and told["digest"] == theirs["digest"]
    assert_close(teacher, expected)
    assert told["metrics"] == pytest.approx(one["metrics"], rel=2e-3, abs=1e-4)
    loaded, alone = (ENGINES["torch"](kind.folder, "policy") for _ in range(2))
    loaded.load_state(StoredState.of(together([told, theirs])))
    alone.load_state(StoredState.of(one["files"]))
    assert_same_update(loaded, alone)


def test_experts_are_not_cut(mixtures: dict[str, Path], ranks: Ranks) -> None:
    for folder in mixtures.values():
        ranks(run_uncut, kind_of("fsdp", "policy", folder, folder))


def run_uncut(kind: Kind) -> None:
    with pytest.raises(
        UserError, match=r"tensor_parallel: \w+ has no supported plan .*moe_tp_experts.*: remove tensor"
    ):
        kind.build(tensor_parallel=2)


def assert_two_do_what_one_does(
    kind: Kind, one: TrainEngine, batch: TrajectoryBatch, ranks: Ranks, folder: Path
) -> Files:
    """Returns the files that the two have written."""
    told = ranks(run, kind, batch, {})
    assert told[0]["outputs"] == told[1]["outputs"]
    assert told[0]["metrics"] == told[1]["metrics"]
    assert told[0]["digest"] == told[1]["digest"]
    assert told[0]["began"] == one.digest(), "the same weights have the same digest in every layout"
    assert_close(told[0]["outputs"], infer(one, kind, batch))
    metrics = one.update(batch, kind.objective, DEALT)
    assert told[0]["metrics"] == pytest.approx(metrics, rel=2e-3, abs=1e-4)

    # two processes wrote it: one process, of another engine, goes on from it
    files = together(told)
    loaded = ENGINES["torch"](kind.folder, kind.head)
    assert isinstance(loaded, ModelEngine)
    loaded.load_state(StoredState.of(files))
    assert loaded.digest() == told[0]["digest"]
    assert_same_update(loaded, one)

    # and it is a model folder
    auto = AutoModelForTokenClassification if kind.head == "value" else AutoModelForCausalLM
    exported = auto.from_pretrained(folder_of(files, folder), dtype=torch.float32)
    trained = dict(loaded.model.named_parameters())
    assert exported.state_dict().keys() >= trained.keys()
    assert all(torch.equal(exported.get_parameter(name), parameter.cpu()) for name, parameter in trained.items())
    tokens = torch.tensor([[5, 9, 30, 31, 7]])
    with torch.no_grad():  # a product with a vector adds in an order that depends on where the weights lie in memory
        found, expected = exported(tokens).logits, float32_model(loaded).cpu()(tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    return files


def test_two_processes_go_on_where_one_stopped(
    kind: Kind, one: TrainEngine, batch: TrajectoryBatch, ranks: Ranks
) -> None:
    one.update(batch, kind.objective, DEALT)
    digest, files, outputs = one.digest(), one.state(), infer(one, kind, batch)
    told = ranks(run, kind, batch, {}, files)
    assert told[0]["began"] == digest
    assert_close(told[0]["outputs"], outputs)
    one.update(batch, kind.objective, DEALT)
    loaded = ENGINES["torch"](kind.folder, kind.head)
    loaded.load_state(StoredState.of(together(told)))
    assert_same_update(loaded, one)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_may_have_nothing_to_do(engine: str, policy_folder: Path, batch: TrajectoryBatch, ranks: Ranks) -> None:
    kind = kind_of(engine, "policy", policy_folder, policy_folder)
    alone = ENGINES["torch"](kind.folder, kind.head)
    for found in ranks(run_few, kind, batch):
        for rows, outputs in zip(([3], [0, 3, 5]), found, strict=True):
            assert_close(outputs, infer(alone, kind, batch.take(rows)))


SHARDS = ([0], [7], [3, 1, 2], [4, 5, 6])
"""Rows of the batch."""
GROUPINGS = ([[0], [1], [2], [3]], [[0, 1, 2, 3]], [[0], [1, 2, 3]], [[3, 1], [2, 0]])
"""Numbers of shards, by the call that computes them."""


def run_groupings(kind: Kind, batch: TrajectoryBatch) -> list[tuple[int, list[Any]]]:
    """For each grouping, the number of forward passes, and the outputs of each shard."""
    engine: Any = kind.build()
    passes: list[Any] = []
    engine.module.register_forward_hook(lambda *_: passes.append(None))
    found = []
    for grouping in GROUPINGS:
        passes.clear()
        outputs: dict[int, Any] = {}
        for numbers in grouping:
            batches = [batch.take(SHARDS[number]) for number in numbers]
            computed = engine.infer_each(
                batches, InferencePlan(tuple(kind.outputs), temperature=0.7, micro_batch_tokens=20)
            )
            outputs |= dict(zip(numbers, computed, strict=True))
        found.append((len(passes), [outputs[number] for number in range(len(SHARDS))]))
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_shards_that_are_computed_together_have_the_same_bits(
    engine: str, policy_folder: Path, batch: TrajectoryBatch, ranks: Ranks
) -> None:
    """And take fewer passes than one by one: of a shard with one row, a rank has none."""
    kind = kind_of(engine, "policy", policy_folder, policy_folder)
    alone = ENGINES["torch"](kind.folder, kind.head)
    for (passes, one_by_one), *grouped in ranks(run_groupings, kind, batch):
        for rows, outputs in zip(SHARDS, one_by_one, strict=True):
            found = {name: column.to_pylist() for name, column in outputs.items()}
            assert_close(found, infer(alone, kind, batch.take(rows)))
        assert all(outputs == one_by_one for _, outputs in grouped)
        assert grouped[0][0] < passes


def run_weights(kind: Kind, dtype: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a rollout in a type gets from an engine that computes in it, and what the engine itself holds."""
    engine: Any = kind.build(dtype=dtype)
    return {name: tensor.clone() for name, tensor in engine.weights(getattr(torch, dtype))}, {
        name: tensor.clone() for name, tensor in engine.weights()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_rollout_gets_all_weights_in_its_type_from_each_rank(
    engine: str, dtype: str, policy_folder: Path, ranks: Ranks
) -> None:
    kind = kind_of(engine, "policy", policy_folder, policy_folder)
    plain: Any = ENGINES["torch"](kind.folder, kind.head)
    one = dict(plain.weights())
    for in_type, held in ranks(run_weights, kind, dtype):
        assert in_type.keys() == held.keys() == one.keys()
        for name, tensor in in_type.items():
            assert torch.equal(held[name], one[name].cpu())
            assert tensor.dtype == getattr(torch, dtype)
            assert torch.equal(tensor, held[name].to(tensor.dtype)), "rounded once"


def run_follow(kind: Kind, batch: TrajectoryBatch, dtype: str) -> tuple[dict[str, torch.Tensor], ...]:
    """The weights of an actor, and those of a model that followed it twice, before, between and after; then a state
    that was stored is loaded, and moved to host memory and back where the engine can."""
    actor, follower = kind.build(), kind.build(trainable=False, dtype=dtype)
    assert isinstance(actor, ModelEngine) and isinstance(follower, ModelEngine)

    def weights(engine: ModelEngine) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in engine.weights()}

    before = weights(follower)
    actor.update(batch, kind.objective, DEALT)
    follower.follow(actor, 0.25)
    between = weights(follower)
    gathered: dict[str, bytes] = {}
    from ratchet.rlhf.distributed import ranks

    for part in ranks.gathered(follower.state()):
        gathered |= part
    follower.follow(actor, 1.0)
    after = weights(follower)
    if "zero3" not in kind.engine:
        follower.place(model=False, optimizer=False)
        follower.place(model=True, optimizer=True)
    follower.load_state(StoredState.of(gathered))
    return weights(actor), before, between, after, weights(follower)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_follows_another_one(
    engine: str, dtype: str, policy_folder: Path, batch: TrajectoryBatch, ranks: Ranks
) -> None:
    """A frozen model in bfloat16 is rounded after each step: 2 ** -9 of a weight."""
    kind = kind_of(engine, "policy", policy_folder, policy_folder)
    in_type = getattr(torch, dtype)
    for actor, before, between, after, loaded in ranks(run_follow, kind, batch, dtype):
        assert any(not torch.equal(actor[name], before[name]) for name in actor)
        for name in actor:
            quarter = before[name].lerp(actor[name], 0.25)
            torch.testing.assert_close(between[name], quarter.to(in_type).float(), rtol=1e-6, atol=1e-8)
            assert torch.equal(after[name], actor[name].to(in_type).float())
            assert torch.equal(loaded[name], between[name])


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        *((engine, {}) for engine in ENGINES),
        ("megatron", {"tensor_parallel": 2}),
        ("megatron", {"pipeline_parallel": 2}),  # the last stage alone sees the loss
    ],
)
def test_nan_in_one_rank_is_refused_by_all(
    engine: str, options: dict[str, Any], policy_folder: Path, batch: TrajectoryBatch, ranks: Ranks
) -> None:
    kind = kind_of(engine, "policy", policy_folder, policy_folder)
    advantages = batch.list("advantages")
    advantages[3][0] = float("nan")
    columns = {name: advantages if name == "advantages" else batch.array(name) for name in batch.columns}
    for before, after in ranks(run_spoiled, kind, TrajectoryBatch.of(columns), options):
        assert before == after


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("head", ["policy", "value"])
@pytest.mark.parametrize("engine", OF_TRANSFORMERS)
def test_two_processes_share_each_sequence(
    engine: str,
    head: Head,
    policy_folder: Path,
    critic_folder: Path,
    batch: TrajectoryBatch,
    ranks: Ranks,
    packing: bool,
) -> None:
    kind = kind_of(engine, head, policy_folder, critic_folder)
    one = ENGINES["torch"](kind.folder, kind.head)
    told = ranks(run, kind, batch, {"sequence_parallel": 2, "packing": packing})
    assert told[0]["outputs"] == told[1]["outputs"]
    assert told[0]["metrics"] == told[1]["metrics"]
    assert_close(told[0]["outputs"], infer(one, kind, batch))
    assert told[0]["metrics"] == pytest.approx(one.update(batch, kind.objective, DEALT), rel=2e-3, abs=1e-4)
    loaded = ENGINES["torch"](kind.folder, kind.head)
    loaded.load_state(StoredState.of(together(told)))
    assert loaded.digest() == told[0]["digest"] == told[1]["digest"]
    assert_same_update(loaded, one)


def odd_folder(name: str, folder: Path, vocabulary: int = 78, padding: int | None = None) -> Path:
    """Models whose plan has more to it: norms of single heads; biases where rows are cut, and tied embeddings.

    Their weights are always the same: float32 rounds the entropy of one such model in hundreds by more than CLOSE.
    """
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "pad_token_id": padding,
    }
    if name == "qwen3":
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16))
    elif name == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("bias"):
                    parameter.normal_()
    elif name == "tied":
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))
    else:
        biases = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
        model = LlamaForCausalLM(LlamaConfig(**shape, **biases))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("bias"):
                    parameter.normal_(generator=torch.Generator().manual_seed(len(parameter_name)))
    model.save_pretrained(folder)
    return folder


def logits_seen(kind: Kind, batch: TrajectoryBatch) -> set[int]:
    """How many tokens of the vocabulary this rank computes logits of."""
    engine: Any = kind.build(tensor_parallel=2)
    seen: set[int] = set()
    head = engine.model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, logits: seen.add(logits.shape[-1]))
    infer(engine, kind, batch)
    return seen


@pytest.mark.parametrize("name", ["qwen3", "biased and tied"])
def test_no_process_has_all_logits(name: str, batch: TrajectoryBatch, ranks: Ranks, tmp_path: Path) -> None:
    folder = odd_folder(name, tmp_path)
    assert ranks(logits_seen, kind_of("fsdp", "policy", folder, folder), batch) == [{78 // 2}] * 2


def test_a_vocabulary_that_the_team_does_not_divide_stays_whole(
    batch: TrajectoryBatch, ranks: Ranks, tmp_path: Path
) -> None:
    folder = odd_folder("qwen3", tmp_path, vocabulary=79)
    kind = kind_of("fsdp", "policy", folder, folder)
    assert ranks(logits_seen, kind, batch) == [{79}] * 2
    told = ranks(run, kind, batch, {"tensor_parallel": 2})
    assert_close(told[0]["outputs"], infer(ENGINES["torch"](folder, "policy"), kind, batch))


@pytest.mark.parametrize("options", [{"shard_size": 1}, {"reshard_after_forward": False}])
def test_what_is_summed_once_per_mini_batch(
    options: dict[str, Any], policy_folder: Path, batch: TrajectoryBatch, ranks: Ranks
) -> None:
    """It gives the same update; and an update that ends before the sum leaves nothing behind."""
    kind = kind_of("fsdp", "policy", policy_folder, policy_folder)
    one = ENGINES["torch"](kind.folder, kind.head)
    told = ranks(run_aborted, kind, batch, options)
    began = one.digest()
    assert_close(told[0]["outputs"], infer(one, kind, batch))
    assert told[0]["metrics"] == pytest.approx(one.update(batch, kind.objective, DEALT), rel=2e-3, abs=1e-4)
    assert told[0]["began"] == told[1]["began"] == began
    loaded = ENGINES["torch"](kind.folder, kind.head)
    loaded.load_state(StoredState.of(together(told)))
    assert loaded.digest() == told[0]["digest"]
    assert_same_update(loaded, one)


def run_aborted(kind: Kind, batch: TrajectoryBatch, options: dict[str, Any]) -> dict[str, Any]:
    """Learn something else first, and forget it: by an update that succeeds, and by one that does not."""
    from ratchet.rlhf.distributed import ranks

    engine = kind.build(**options)
    files: Files = {}
    for part in ranks.gathered(engine.state()):
        files |= part
    engine.update(batch, kind.objective, replace(PLAN, lr=0.1))
    infer(engine, kind, batch)
    with pytest.raises(KeyboardInterrupt):
        engine.update(batch, Aborts(kind.objective), replace(DEALT, micro_batch_tokens=10))
    return run(kind, batch, options, files, engine=engine)


def parts_of_rank(rank: int, count: int, folder: Path, options: dict[str, Any]) -> dict[str, list[tuple[int, int]]]:
    """First and last element of each run that a rank holds."""
    with only_rank(rank, count):
        engine: Any = ENGINES["fsdp"](folder, "policy", **options)
        return {
            name: [
                (start, start + part.values.shape[1])
                for part in engine.parts("model", name)
                for start in part.starts.tolist()
            ]
            for name in engine.names()
        }


@pytest.mark.parametrize(
    "options", [{"tensor_parallel": 2}, {"shard_size": 2}, {"shard_size": 4, "tensor_parallel": 2}], ids=str
)
@pytest.mark.parametrize("name", ["qwen3", "biased and tied"])
def test_eight_processes_hold_each_element_once(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = odd_folder(name, tmp_path)
    by_rank = [in_another_process(parts_of_rank, rank, 8, folder, options) for rank in range(8)]
    sizes = {
        name: parameter.numel() for name, parameter in load_actor(ModelConfig(path=str(folder))).named_parameters()
    }
    assert by_rank[0].keys() == sizes.keys()
    for parameter, size in sizes.items():
        runs = sorted(run for rank in by_rank for run in rank[parameter])
        assert [first for first, _ in runs] == [0, *(last for _, last in runs[:-1])], parameter
        assert runs[-1][1] == size


@pytest.mark.parametrize("padding", [None, 5, 44])
@pytest.mark.parametrize("name", ["qwen3", "biased and tied"])
def test_matrices_of_other_models_are_shared(
    name: str, padding: int | None, batch: TrajectoryBatch, ranks: Ranks, tmp_path: Path
) -> None:
    """The token that pads is not learned from where it is read, and no other token of any process is taken for it."""
    folder = odd_folder(name, tmp_path, padding=padding)
    read = {token for prompt in batch.list("prompt_ids") for token in prompt}
    assert {5, 44} <= read, "both are the sixth row of a process"
    kind = kind_of("fsdp", "policy", folder, folder)
    one = ENGINES["torch"](folder, "policy")
    told = ranks(run, kind, batch, {"tensor_parallel": 2})
    assert_close(told[0]["outputs"], infer(one, kind, batch))
    assert told[0]["metrics"] == pytest.approx(one.update(batch, kind.objective, DEALT), rel=2e-3, abs=1e-4)
    files = together(told)
    loaded = ENGINES["torch"](folder, "policy")
    loaded.load_state(StoredState.of(files))
    assert_same_update(loaded, one)
    assert ranks(run, kind, batch, {"tensor_parallel": 2}, files)[1]["began"] == loaded.digest()


@pytest.mark.parametrize("head", ["policy", "value"])
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": "selective", "packing": True}, {"offload": True}])
def test_two_processes_share_each_matrix(
    head: Head,
    options: dict[str, Any],
    policy_folder: Path,
    critic_folder: Path,
    batch: TrajectoryBatch,
    ranks: Ranks,
) -> None:
    kind = kind_of("fsdp", head, policy_folder, critic_folder)
    one = ENGINES["torch"](kind.folder, kind.head)
    told = ranks(run, kind, batch, {"tensor_parallel": 2, **options})
    assert told[0]["began"] == one.digest()
    assert told[0]["outputs"] == told[1]["outputs"]
    assert told[0]["metrics"] == told[1]["metrics"]
    assert_close(told[0]["outputs"], infer(one, kind, batch))
    assert told[0]["metrics"] == pytest.approx(one.update(batch, kind.objective, DEALT), rel=2e-3, abs=1e-4)
    files = together(told)
    loaded = ENGINES["torch"](kind.folder, kind.head)
    loaded.load_state(StoredState.of(files))
    assert loaded.digest() == told[0]["digest"] == told[1]["digest"]
    assert_same_update(loaded, one)
    assert ranks(run, kind, batch, {"tensor_parallel": 2, **options}, files)[1]["began"] == loaded.digest()


MEGATRON: list[dict[str, Any]] = [
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2},
    {"tensor_parallel": 2, "distributed_optimizer": False},
    {"distributed_optimizer": False},
    {"pipeline_parallel": 2, "gradient_checkpointing": True},
    {"context_parallel": 2},
]


@pytest.mark.parametrize("head", ["policy", "value"])
@pytest.mark.parametrize("options", MEGATRON, ids=str)
def test_two_processes_compute_a_model_by_megatron(
    head: Head,
    options: dict[str, Any],
    policy_folder: Path,
    critic_folder: Path,
    batch: TrajectoryBatch,
    ranks: Ranks,
) -> None:
    kind = kind_of("megatron", head, policy_folder, critic_folder)
    assert_split_as_one(kind, options, batch, ranks)


@pytest.mark.parametrize("options", MEGATRON[:2], ids=str)
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "tied"])
def test_megatron_computes_other_models(
    name: str, options: dict[str, Any], batch: TrajectoryBatch, ranks: Ranks, tmp_path: Path
) -> None:
    folder = odd_folder(name, tmp_path)
    assert_split_as_one(kind_of("megatron", "policy", folder, folder), options, batch, ranks)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"expert_parallel": 2},
        {"expert_parallel": 2, "tensor_parallel": 2},
        {"expert_parallel": 2, "context_parallel": 2, "gradient_checkpointing": "selective"},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"expert_parallel": 2, "distributed_optimizer": False},
    ],
    ids=str,
)
def test_megatron_computes_mixtures_of_experts(
    options: dict[str, Any], mixtures: dict[str, Path], batch: TrajectoryBatch, ranks: Ranks
) -> None:
    kind = kind_of("megatron", "policy", mixtures["qwen3_moe"], mixtures["qwen3_moe"])
    assert_split_as_one(kind, options, batch, ranks)


@pytest.mark.slow
def test_four_processes_compute_a_model_by_megatron(
    policy_folder: Path,
    critic_folder: Path,
    mixtures: dict[str, Path],
    batch: TrajectoryBatch,
    tmp_path: Path,
) -> None:
    four = Ranks(tmp_path, 4)
    try:
        dense: dict[Head, list[dict[str, Any]]] = {
            "policy": [{"tensor_parallel": 2, "pipeline_parallel": 2}, {"tensor_parallel": 2, "context_parallel": 2}],
            "value": [{"context_parallel": 2, "pipeline_parallel": 2}],
        }
        for head, layouts in dense.items():
            for options in layouts:
                assert_split_as_one(kind_of("megatron", head, policy_folder, critic_folder), options, batch, four)
        mixture = kind_of("megatron", "policy", mixtures["qwen3_moe"], mixtures["qwen3_moe"])
        for options in (
            {"tensor_parallel": 2},  # each copy has all experts
            {"tensor_parallel": 2, "expert_parallel": 4},
            {"pipeline_parallel": 2, "expert_parallel": 2},
        ):
            assert_split_as_one(mixture, options, batch, four)
    finally:
        four.close()


def assert_split_as_one(kind: Kind, options: dict[str, Any], batch: TrajectoryBatch, ranks: Ranks) -> None:
    """Processes that share a model do what plain PyTorch does, and each goes on from what the other stored."""
    one = ENGINES["torch"](kind.folder, kind.head)
    told = ranks(run, kind, batch, options)
    for other in told[1:]:
        assert all(told[0][key] == other[key] for key in ("began", "outputs", "metrics", "digest"))
    assert told[0]["began"] == one.digest()
    assert_close(told[0]["outputs"], infer(one, kind, batch))
    assert told[0]["metrics"] == pytest.approx(one.update(batch, kind.objective, DEALT), rel=2e-3, abs=1e-4)
    files = together(told)
    loaded = ENGINES["torch"](kind.folder, kind.head)
    loaded.load_state(StoredState.of(files))
    assert loaded.digest() == told[0]["digest"]
    assert_same_update(loaded, one)
    again = ranks(run, kind, batch, options, files)
    assert again[1]["began"] == loaded.digest()
    loaded.update(batch, kind.objective, DEALT)
    after = ENGINES["torch"](kind.folder, kind.head)
    after.load_state(StoredState.of(together(again)))
    assert_same_update(after, loaded)


def run_in_pieces(kind: Kind, batch: TrajectoryBatch, options: dict[str, Any]) -> dict[str, Any]:
    """Logits of two tokens at once: ranks have other numbers of pieces."""
    from ratchet.rlhf.models import token_outputs

    before = token_outputs.LOGITS_BYTES
    token_outputs.LOGITS_BYTES = 2 * 4 * 78
    try:
        return run(kind, batch, options)
    finally:
        token_outputs.LOGITS_BYTES = before


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        *((engine, {}) for engine in ENGINES),
        ("fsdp", {"tensor_parallel": 2}),
        ("megatron", {"tensor_parallel": 2}),
        ("megatron", {"context_parallel": 2}),
        ("megatron", {"pipeline_parallel": 2}),
    ],
)
def test_logits_in_pieces_by_two_processes(
    engine: str, options: dict[str, Any], policy_folder: Path, batch: TrajectoryBatch, ranks: Ranks
) -> None:
    kind = kind_of(engine, "policy", policy_folder, policy_folder)
    one = ENGINES["torch"](kind.folder, kind.head)
    told = ranks(run_in_pieces, kind, batch, options)
    assert_close(told[0]["outputs"], infer(one, kind, batch))
    assert told[0]["metrics"] == pytest.approx(one.update(batch, kind.objective, DEALT), rel=2e-3, abs=1e-4)


def run_refused(kind: Kind, options: dict[str, Any]) -> None:
    [(key, size)] = options.items()
    with pytest.raises(UserError, match=f"{key} is {size}, which does not divide the model's"):
        kind.build(**options)


def test_experts_whose_number_the_processes_do_not_divide(batch: TrajectoryBatch, ranks: Ranks, tmp_path: Path) -> None:
    """Each process holds rows of all three experts, and none is padded."""
    folder = moe_folder(tmp_path / "three", "qwen3_moe", num_experts=3)
    kind = kind_of("fsdp", "policy", folder, folder)
    one = ENGINES["torch"](kind.folder, kind.head)
    assert_two_do_what_one_does(kind, one, batch, ranks, tmp_path)
    for held in ranks(run_shapes_of_experts, kind):
        assert held == {(3, 16, 32), (3, 16, 16)}


def run_shapes_of_experts(kind: Kind) -> set[tuple[int, ...]]:
    engine: Any = kind.build()
    shares = [parameter.to_local().shape for parameter in engine.parameters.values()]
    return {tuple(shape) for shape in shares if len(shape) == 3}


@pytest.mark.slow
def test_four_processes_in_teams_of_two(policy_folder: Path, batch: TrajectoryBatch, tmp_path: Path) -> None:
    kind = kind_of("fsdp", "policy", policy_folder, policy_folder)
    one = ENGINES["torch"](kind.folder, kind.head)
    outputs, metrics = infer(one, kind, batch), one.update(batch, kind.objective, DEALT)
    four = Ranks(tmp_path, 4)
    try:
        # of four that share a sequence, two look at the same head of keys
        for team in (
            {"tensor_parallel": 2},
            {"sequence_parallel": 2},
            {"sequence_parallel": 4},
            {"shard_size": 2},
            {"shard_size": 2, "tensor_parallel": 2, "reshard_after_forward": False},
        ):
            told = four(run, kind, batch, team)
            assert_close(told[3]["outputs"], outputs)
            assert told[3]["metrics"] == pytest.approx(metrics, rel=2e-3, abs=1e-4)
            files = together(told)
            loaded = ENGINES["torch"](kind.folder, kind.head)
            loaded.load_state(StoredState.of(files))
            assert loaded.digest() == told[3]["digest"]
            assert_same_update(loaded, one)
            assert four(run, kind, batch, team, files)[3]["began"] == loaded.digest()
        four(run_refused, kind, {"tensor_parallel": 4})  # it has two heads of keys
    finally:
        four.close()


@pytest.mark.parametrize("engine", ["fsdp", "zero1", "zero2", "zero3"])
def test_offloading_changes_nothing(engine: str, policy_folder: Path, batch: TrajectoryBatch, ranks: Ranks) -> None:
    kind = kind_of(engine, "policy", policy_folder, policy_folder)
    [plain, _], [offloaded, _] = (ranks(run, kind, batch, {"offload": offload}) for offload in (False, True))
    assert_close(offloaded["outputs"], plain["outputs"])
    assert offloaded["metrics"] == pytest.approx(plain["metrics"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        *((engine, {}) for engine in ENGINES),
        ("megatron", {"tensor_parallel": 2}),
        ("megatron", {"pipeline_parallel": 2}),
        ("megatron", {"context_parallel": 2}),
        ("megatron", {"distributed_optimizer": False}),
    ],
)
def test_bfloat16_by_two_processes(
    engine: str, options: dict[str, Any], policy_folder: Path, batch: TrajectoryBatch, ranks: Ranks
) -> None:
    """A bfloat16 has 8 bits; the optimizer's weights stay float32."""
    assert_close_in_bfloat16(kind_of(engine, "policy", policy_folder, policy_folder), batch, ranks, **options)


@pytest.mark.parametrize("engine", ENGINES)
def test_experts_in_bfloat16(engine: str, mixtures: dict[str, Path], batch: TrajectoryBatch, ranks: Ranks) -> None:
    folder = mixtures["qwen3_moe"]
    assert_close_in_bfloat16(kind_of(engine, "policy", folder, folder), batch, ranks)


def assert_close_in_bfloat16(kind: Kind, batch: TrajectoryBatch, ranks: Ranks, **layout: Any) -> None:
    options = {"dtype": "bfloat16", "gradient_checkpointing": "selective"} | layout
    told = ranks(run, kind, batch, options)
    alone = ENGINES["torch"](kind.folder, kind.head)
    assert told[0]["outputs"] != infer(alone, kind, batch)
    assert_close(told[0]["outputs"], infer(alone, kind, batch), atol=0.3)
    loaded = ENGINES["torch"](kind.folder, kind.head)
    loaded.load_state(StoredState.of(together(told)))
    assert loaded.digest() == told[0]["digest"]


def test_two_processes_judge_as_one(policy_folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    folders = [
        tiny.reward_model_folder(tmp_path / name, policy_folder, process=name == "process", labels=labels)
        for name, labels in (("outcome", 1), ("process", 2))
    ]
    told = ranks(run_judges, *folders)
    assert told[0] == told[1]
    for found, expected in zip(told[0], run_judges(*folders), strict=True):
        assert len(found) == 5
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
