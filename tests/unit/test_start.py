"""What a start refuses before anything slow begins: devices that are not there, and sequences that are too long."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import AutoTokenizer

from ratchet.flows.summary import first_prompt, summary
from ratchet.infra.execution.preflight.devices import check_devices
from ratchet.infra.execution.preflight.inputs import check_inputs
from ratchet.infra.execution.preflight.run import say_what_changed
from ratchet.infra.progress import Note, listening
from ratchet.infra.store.records import Claim, ShardCommit
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.data.formats import formulas_of
from ratchet.rlhf.data.prompts import PromptDataset
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.hf_configs import longest_sequence
from tests import tiny

without_gpus = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.workspace(tmp_path_factory.mktemp("start"))


def refusal(config: RunConfig) -> list[str]:
    with pytest.raises(UserError) as refused:
        check_inputs(config)
    return str(refused.value).splitlines()


def test_a_run_that_exists_is_not_new(root: Path, tmp_path: Path) -> None:
    config = tiny.config(root, run__name="run", run__store=f"file://{tmp_path}", train__iterations=2, actor__lr=0.003)
    store = RunStore.at(f"file://{tmp_path}/run")
    assert summary(config, store.log.read())[0].endswith(": new, 2 iterations")
    values = config.model_dump(mode="json")
    store.log.claim(Claim(config=values, code="", packages={}, threads=1, host="here", initial={}))
    assert summary(config, store.state)[0].endswith(": new, 2 iterations"), "nothing is committed"
    shard = store.write_shard(0, "generate", 0, 0, pa.table({"trajectory_id": ["a"]}))
    store.commit(ShardCommit(iteration=0, stage="generate", shard=0, data=shard, term=1, seconds=0.0))
    assert summary(config, store.state)[0].endswith(": continues after 0 of 2 iterations")
    state = store.state.model_copy(update={"iteration": 2, "shards": {}})
    done = "nothing is left to train, it has 2 of 2 iterations: train.iterations=3 or more continues it"
    assert summary(config, state)[0].endswith(f": {done}")
    fewer = config.with_values({"train.iterations": 1, "actor.lr": 1})
    notes: list[object] = []
    with listening(notes.append):
        say_what_changed(state, config)
        say_what_changed(state, fewer)
    changes = "actor.lr 0.003 -> 1.0; train.iterations 2 -> 1"
    assert notes == [Note(f"continues with different settings from iteration 2 on: {changes}")]


@without_gpus
def test_pools_that_need_gpus_on_a_machine_without_any(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")  # others may have a Ray on this machine
    pools = {"train": {"workers": 2, "gpus_per_worker": 0.5}, "judge": {"gpus_per_worker": 1.5}, "host": {}}
    roles = dict.fromkeys(("actor", "critic", "reference", "rollout"), "train")
    config = tiny.config(root, pools=pools, placement=roles)
    with pytest.raises(UserError) as refused:
        check_devices(config)
    fix = "remove pools and placement, or set RAY_ADDRESS to a cluster's address"
    assert str(refused.value).splitlines() == [
        f"pools.train asks for 1 GPU, but this machine has none: {fix}",
        f"pools.judge asks for 1.5 GPUs, but this machine has none: {fix}",
    ]
    check_devices(config.with_values({"pools": {}, "placement": "colocated"}))
    with pytest.raises(UserError, match="this machine has none: remove pools, or set RAY_ADDRESS"):
        check_devices(tiny.config(root, pools={"all": {"gpus_per_worker": 1}}))
    check_devices(tiny.config(root, pools={"all": {"workers": 2}}))


@without_gpus
def test_a_vllm_that_needs_more_gpus_than_there_are(root: Path) -> None:
    config = tiny.config(root, rollout__engine={"type": "vllm", "tensor_parallel": 2})
    with pytest.raises(
        UserError, match=r"^rollout.engine.tensor_parallel is 2, but this machine has no GPU: remove it$"
    ):
        check_devices(config)
    check_devices(config.with_values({"rollout.engine": "vllm"}))
    in_a_pool = {"pools": {"all": {"workers": 2}}}
    check_devices(config.with_values(in_a_pool))  # a worker without a GPU is a device


def with_config(folder: Path, root: Path, **changes: Any) -> Path:
    """The tiny model with another config."""
    from transformers import LlamaConfig

    shutil.copytree(root / "model", folder)
    config = LlamaConfig.from_pretrained(folder)
    config.update(changes)
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("engine", ["hf", "server"])
def test_trajectories_that_the_models_cannot_read(root: Path, tmp_path: Path, engine: str) -> None:
    short = with_config(tmp_path / "short", root, max_position_embeddings=207)
    server = {"type": "server", "urls": ["http://127.0.0.1:1"], "weights_folder": str(tmp_path)}
    config = tiny.config(root, model__path=str(short), rollout__engine="hf" if engine == "hf" else server)
    assert refusal(config) == [
        f"data.max_prompt_tokens 200 + rollout.max_response_tokens 8 is 208, but {short} reads at most 207 tokens "
        "(max_position_embeddings in its config.json): lower one of them"
    ]
    check_inputs(config.with_values({"rollout.max_response_tokens": 7}))
    own_critic = tiny.config(root, critic__model={"path": str(short)})
    assert [line.partition(" but ")[2].split()[0] for line in refusal(own_critic)] == [str(short)]


def test_the_limit_is_that_of_vllm(root: Path, tmp_path: Path) -> None:
    from transformers import MambaConfig

    from ratchet.rlhf.config import ModelConfig

    def limit(name: str, **rope: Any) -> int | None:
        folder = with_config(tmp_path / name, root, rope_parameters={"rope_theta": 1e4, **rope})
        return longest_sequence(ModelConfig(path=str(folder)))

    assert limit("plain", rope_type="default") == 1024
    assert limit("linear", rope_type="linear", factor=2.0) == 2048
    # transformers' own limit includes the factor
    assert limit("yarn", rope_type="yarn", factor=2.0, original_max_position_embeddings=512) == 1024
    MambaConfig().save_pretrained(tmp_path / "mamba")
    assert longest_sequence(ModelConfig(path=str(tmp_path / "mamba"))) is None


def test_all_mistakes_are_named_at_once(root: Path) -> None:
    config = tiny.config(
        root,
        rollout__max_response_tokens=1000,
        actor__micro_batch_tokens=4096,
        critic__micro_batch_tokens=4096,
        reward__function="letters_of",
        rollout__environment="no_such_environment",
        data__train=[str(root / "nothing.parquet")],
    )
    lines = refusal(config)
    assert len(lines) == 4
    for line, part in zip(
        lines, ("letters_of", "no_such_environment", "reads at most", "nothing.parquet"), strict=True
    ):
        assert part in line


def test_a_metric_that_no_validation_reports(root: Path, tmp_path: Path) -> None:
    held_out = tiny.prompt_file(tmp_path / "held_out.parquet", prompts=2)
    validation = {"data": str(held_out), "n": 2, "metric": "val/countdown/mean_score"}
    config = tiny.config(root, validation=validation, reward__function="countdown")
    names = [f"val-core/countdown/{name}" for name in ("reward/mean@2", "acc/mean@2", "reward/maj@2", "reward/best@2")]
    fix = "choose one of them, or set validation.metric=null for the mean score of the first data source"
    assert refusal(config) == [
        "validation.metric val/countdown/mean_score is not a metric of this validation, which has "
        f"{', '.join(names)}: {fix}"
    ]
    for metric in (*names, None):
        check_inputs(config.with_values({"validation.metric": metric}))
    [line] = refusal(config.with_values({"reward.function": "length", "validation.metric": names[1]}))
    assert names[1] not in line.partition("which has")[2], "nothing tells which answers are solved"


def test_prompts_that_are_texts_are_rendered_unless_told_otherwise(root: Path, tmp_path: Path) -> None:
    text = "1 + 1?\x1b[31m\n" + "2" * 400
    row = {"data_source": "any", "prompt": text, "reward_model": {"ground_truth": "2"}}
    (tmp_path / "texts.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    model = {"path": str(root / "model"), "chat_template": str(tmp_path / "template.jinja"), "dtype": "float32"}
    config = tiny.config(
        root,
        model=model,
        data__train=[str(tmp_path / "texts.jsonl")],
        data__max_prompt_tokens=500,
        actor__micro_batch_tokens=1024,
        critic__micro_batch_tokens=1024,
        reward__function="length",
    )
    notes = notes_of(config)
    assert (
        f"the prompts are texts: the chat template of {root / 'model'} renders each as a message of the user" in notes
    )
    shown = first_prompt(config)
    assert r"""tokens: "<user>1 + 1?\u001b[31m\n2222""" in shown
    assert shown.endswith('2" and 118 characters more')
    assert all(character.isprintable() for character in shown)
    (tmp_path / "template.jinja").write_text(notes.rpartition("a file that has only ")[2])
    assert r"""tokens: "1 + 1?\u001b""" in first_prompt(config)


def test_prompts_that_call_tools_are_rendered_or_refused_by_their_row(root: Path, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    path = tmp_path / "calls.jsonl"
    path.write_text((json.dumps({"data_source": "any", "prompt": messages}) + "\n") * 2)
    changes: dict[str, Any] = {"data__train": [str(path)], "data__max_prompt_tokens": 500, "reward__function": "length"}
    changes |= {"actor__micro_batch_tokens": 1024, "critic__micro_batch_tokens": 1024}
    fix = "the prompt calls tools, and the model has no chat template: set model.chat_template"
    assert refusal(tiny.config(root, **changes)) == [f"{path}, line 1: {fix}"]
    (tmp_path / "template.jinja").write_text(tiny.CHAT_TEMPLATE)
    model = {"path": str(root / "model"), "chat_template": str(tmp_path / "template.jinja"), "dtype": "float32"}
    config = tiny.config(root, model=model, **changes)
    check_inputs(config)
    [line] = refusal(config.with_values({"data.max_prompt_tokens": 50}))
    assert line.startswith(f"{path}, line 1: the prompt has 103 tokens, more than data.max_prompt_tokens 50 ")
    rendered = '(user)1 + 1?(assistant)<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert json.dumps(rendered)[1:-1] in first_prompt(config)


def test_the_policy_sees_the_tools_of_a_row_or_the_start_is_refused(root: Path, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "<eos>", "parameters": {"type": "object"}}}
    path, template = tmp_path / "tools.jsonl", tmp_path / "template.jinja"
    offered: tuple[object, ...] = (json.dumps([tool]), [], None)
    row = {"prompt": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}
    path.write_text("".join(json.dumps({**row, "tools": tools}) + "\n" for tools in offered))
    template.write_text("{{ tools | tojson if tools }}" + tiny.CHAT_TEMPLATE)
    changes: dict[str, Any] = {"data__train": [str(path)], "reward__function": "length"}
    fix = "set model.chat_template, choose a model that was trained to call tools, or rename the column"
    no_template = f"{path}, line 1: the prompt has tools, and the model has no chat template: {fix}"
    assert refusal(tiny.config(root, **changes)) == [no_template]
    model = {"path": str(root / "model"), "chat_template": str(template), "dtype": "float32"}
    config = tiny.config(root, model=model, **changes)
    assert notes_of(config).splitlines() == [
        f"1 of 3 prompts spell special tokens (<eos>), the first in {path}, line 1: they are text, unless "
        "data.special_tokens is keep"
    ]
    assert json.dumps('"name": "add"')[1:-1] in first_prompt(config)
    [line] = refusal(config.with_values({"data.max_prompt_tokens": 60}))
    assert line.startswith(f"{path}, line 1: the prompt has 1")
    assert "more than data.max_prompt_tokens 60" in line
    [line] = refusal(config.with_values({"rollout.tools": "tests.tool_functions:weather"}))
    assert line == (
        f"{path}, line 1: the prompt has tools, and so has rollout.environment, whose tools the policy gets: remove "
        "the column tools, or rollout.tools and rollout.mcp"
    )
    check_inputs(config.with_values({"rollout.environment": "calculator"}))
    judge = str(tiny.reward_model_folder(tmp_path / "judge", root / "model"))
    judged = tiny.config(
        root, model=model, reward={"model": {"path": judge}, "function": None}, data__train=[str(path)]
    )
    assert refusal(judged) == [no_template], "the reward model has to see them, too"
    check_inputs(judged.with_values({"reward.model.chat_template": str(template)}))


def test_auto_goes_by_the_name_of_the_file_and_the_fix_that_it_names_works(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "gsm8k" / "train.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"prompt": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}) + "\n")
    config = tiny.config(root, data__train=[str(path)])
    [line] = refusal(config)
    assert line.startswith(f"{path}, line 1: reward.function auto has no built-in reward for data_source train: ")
    assert "a built-in (reward.function: gsm8k)" in line
    check_inputs(config.with_values({"reward.function": "gsm8k"}))
    check_inputs(config.with_values({"data.train": [f"{path.parent}:train"]}))


def notes_of(config: RunConfig) -> str:
    notes: list[str] = []
    with listening(lambda event: notes.append(event.text) if isinstance(event, Note) else None):
        check_inputs(config)
    return "\n".join(notes)


GEMMA = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "({{ m.role }}){{ m.content }}{% endfor %}{% if add_generation_prompt %}(assistant){% endif %}"
)


def rows(path: Path, *contents: Any) -> str:
    """A file of prompts, each a text or messages; its address."""
    path.write_text("".join(json.dumps({"prompt": content, "answer": "4"}) + "\n" for content in contents))
    return str(path)


def test_a_template_that_refuses_a_role_is_one_line(root: Path, tmp_path: Path) -> None:
    (tmp_path / "gemma.jinja").write_text(GEMMA)
    system, user = {"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2?"}
    path = rows(tmp_path / "a.jsonl", [user], [system, user], [user])
    template = {"model__chat_template": str(tmp_path / "gemma.jinja"), "reward__function": "constant"}
    config = tiny.config(root, data__train=[path], **template)
    refuses = "the chat template refuses the messages: System role not supported"
    assert refusal(config) == [f"{path}, line 2: {refuses}"]
    of_config = config.with_values({"data.system_prompt": "Add.", "data.train": [rows(tmp_path / "b.jsonl", "2 + 2?")]})
    [line] = refusal(of_config)
    assert line.startswith(f"{tmp_path / 'b.jsonl'}, line 1: {refuses} (data.system_prompt puts a system message")
    check_inputs(of_config.with_values({"data.system_prompt": None}))


QWEN = (
    "{% for m in messages %}<eos>{{ m.role }}|{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<eos>assistant|{% endif %}"
)
LLAMA = (
    "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% elif m.role == 'assistant' %}{{ m.content }}"
    "{% elif m.role in ['ipython', 'developer'] %}<{{ m.content }}>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "role", "says"),
    [
        (QWEN, "human", "the chat template knows no role 'human': write user, or set another model.chat_template"),
        (QWEN, "User", "the chat template knows no role 'User': write user, or"),
        (QWEN, "developer", "the chat template knows no role 'developer': write system, or"),
        (QWEN, "narrator", "the chat template knows no role 'narrator': rename it, or"),
        (QWEN, "tool", None),
        (LLAMA, "human", "the chat template knows no role 'human': write user, or"),
        (LLAMA, "tool", "the chat template leaves out messages of the role tool: set another model.chat_template, or "),
        (LLAMA, "ipython", None),
        (LLAMA, "developer", None),
        (None, "human", None),
    ],
)
def test_roles_that_a_template_does_not_know(
    root: Path, tmp_path: Path, template: str | None, role: str, says: str | None
) -> None:
    user = {"role": "user", "content": "2 + 2?"}
    path = rows(tmp_path / "a.jsonl", [user], [user, {"role": role, "content": "4"}, user])
    config = tiny.config(root, data__train=[path], reward__function="constant")
    if template is not None:
        (tmp_path / "template.jinja").write_text(template)
        config = config.with_values({"model.chat_template": str(tmp_path / "template.jinja")})
    if says is None:
        check_inputs(config)
        return
    [line] = refusal(config)
    assert line.startswith(f"{path}, line 2: {says}")


def test_columns_that_the_policy_does_not_see_are_listed(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    functions = [{"name": "add"}]
    others: list[dict[str, Any]] = [
        {},
        {"functions": functions, "source": "any"},
        {"functions": functions, "system": "Add."},
        {"functions": [], "documents": None},
    ]
    path.write_text("".join(json.dumps({"prompt": "2 + 2?", "answer": "4", **columns}) + "\n" for columns in others))
    notes = notes_of(tiny.config(root, data__train=[str(path)], reward__function="constant")).splitlines()
    where = "it is in extra_info, for rewards and environments, and the policy does not see it"
    assert [line for line in notes if "does not see" in line] == [
        f"2 of 4 prompts have functions, the first in {path}, line 2: {where}",
        f"1 of 4 prompts have system, the first in {path}, line 3: {where}",
    ]


@pytest.mark.parametrize(("treatment", "are"), [("split", "text, unless"), ("keep", "control tokens, as")])
def test_prompts_that_spell_special_tokens_are_counted(root: Path, tmp_path: Path, treatment: str, are: str) -> None:
    path = rows(tmp_path / f"{treatment}.jsonl", "2 + 2?", "2<eos>2<pad>", [{"role": "user", "content": "<eos>"}])
    config = tiny.config(root, data__train=[path], reward__function="constant", data__special_tokens=treatment)
    notes: list[object] = []
    with listening(notes.append):
        check_inputs(config)
    [said] = [each.text for each in notes if isinstance(each, Note) and "special tokens" in each.text]
    assert said.startswith(
        f"2 of 3 prompts spell special tokens (<eos>, <pad>), the first in {path}, line 2: they are {are}"
    )


WORKED = "The speed is the way by the time, so with $60$ km and $2$ h it is five times that of the bike at $6$ km/h."


def test_the_truth_is_the_answer_and_not_the_way_to_it(root: Path, tmp_path: Path) -> None:
    """As rows of OpenR1-Math and NuminaMath have both; the trial says that the two differ."""
    row = {"prompt": "A train goes $60$ km in $2$ h. Its speed?", "solution": WORKED, "answer": "30"}
    good = row | {"solution": "$60$ km in $2$ h, so it is $\\boxed{30}$."}
    files = {name: tmp_path / f"{name}.jsonl" for name in ("differs", "agrees", "alone")}
    for path, written in zip(files.values(), (row, good, {**row, "answer": None}), strict=True):
        path.write_text(json.dumps(written) + "\n")
    config = tiny.config(root, data__train=[str(files["differs"])], reward__function="math")
    assert [prompt.ground_truth for prompt in PromptDataset([files["differs"], files["agrees"]])] == ["30", "30"]
    said = notes_of(config)
    assert f"{files['differs']}, line 1: reward.function math gives the row's own solution ('The speed" in said
    assert "because the ground truth is '30'" in said
    agrees = config.with_values({"data.train": [str(files["agrees"])]})
    assert "own solution" not in notes_of(agrees)
    for changes in ({}, {"reward.function": "auto", "data.train": [f"{tmp_path}/math.jsonl"]}):
        path = Path(changes.get("data.train", [str(files["alone"])])[0])
        path.write_text(files["alone"].read_text())
        [line] = refusal(config.with_values({"data.train": [str(path)], **changes}))
        assert line.startswith(f"{path}, line 1: the ground truth is a text of several formulas ('The speed")
        assert "put the answer into a column answer" in line
    files["alone"].write_text(json.dumps(row | {"solution": "$60$ km in $2$ h: $\\fbox{30}$", "answer": None}) + "\n")
    check_inputs(config.with_values({"data.train": [str(files["alone"])]}))


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        ("30", []),
        ("$30$", ["$30$"]),
        ("costs \\$5 and $x$, then $$y$$", ["$x$", "$$y$$"]),
        ("\\(x\\) or \\[\ny\n\\]", ["\\(x\\)", "\\[\ny\n\\]"]),
    ],
)
def test_the_formulas_of_a_text(text: str, formulas: list[str]) -> None:
    assert formulas_of(text) == formulas


def test_tokens_without_embeddings_are_named(root: Path, tmp_path: Path) -> None:
    """A token was added to the tokenizer, and the model was not resized."""
    folder = tmp_path / "added"
    shutil.copytree(root / "model", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = len(tokenizer)
    tokenizer.add_tokens(["<a>", "<b>", "<c>", "<d>"])
    tokenizer.save_pretrained(folder)
    has = f"has embeddings for {size} tokens, and the tokenizer of {folder} has {size + 4}"
    fix = f"call model.resize_token_embeddings({size + 4}) and save the model, or remove the tokens <a>, <b>, <c> and 1"
    frozen = shutil.copytree(root / "model", tmp_path / "frozen")
    others = {"critic__model": str(root / "model"), "reference__model": str(frozen)}
    lines = refusal(tiny.config(root, model={"path": str(folder), "dtype": "float32"}, **others))
    assert [line.removesuffix(" more") for line in lines] == [
        f"{path} {has}: {fix}" for path in (folder, root / "model", frozen)
    ]
    judge = tiny.reward_model_folder(tmp_path / "judge", folder)
    [line] = refusal(tiny.config(root, reward={"model": {"path": str(judge), "dtype": "float32"}, "function": None}))
    assert line.startswith(f"{judge} has embeddings for {size} tokens")
