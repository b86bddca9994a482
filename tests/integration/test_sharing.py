"""What people share: exported folders with their model cards, and pushes to a hub."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants
from markdown_it import MarkdownIt
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from ratchet.flows import report
from ratchet.flows.commands import tables
from ratchet.flows.train import train
from ratchet.infra.runs import hub as pushes
from ratchet.infra.runs.hub import push, push_trajectories
from ratchet.infra.runs.parquet_file import write_parquet
from ratchet.infra.runs.run import Run, open_run
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import sha256_of
from ratchet.rlhf.errors import RatchetError, UserError
from ratchet.rlhf.schema import frame_of
from tests import cards, modes, tiny
from tests.hub_server import READS, WRITES, Hub, Repository, hub_server, validated
from tests.pictures import observed, picture
from tests.ports import free_port
from tests.prefect_server import locked
from tests.processes import Processes

HOSTILE = '`|</details><script>hacked()</script>\n# `` <img src=x onerror="hacked()"> [a](javascript:hacked()) ```'
MEAN_SCORE = f"val-core/{HOSTILE}/reward/mean@1"
KEY = "sk-this-is-a-secret"
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info=None, api_key=None):
    return solution_str.count("a") / 8
"""
Push = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def shared(common: Path, workspace: Path, prefect_server: str) -> Run:
    """A run of two iterations, whose names are markup, whose reward takes a secret, and whose second iteration has
    another config."""
    folder = common / "sharing"
    folder.mkdir(exist_ok=True)
    with locked(folder):
        if not (folder / "done").exists():
            _make(folder, workspace)
            (folder / "done").touch()
    return open_run(f"file://{folder}/runs/shared")


def _make(folder: Path, workspace: Path) -> None:
    shutil.copytree(workspace / "model", folder / "model")
    (folder / "model" / "tokenizer.json").chmod(0o600)
    (folder / "model" / "README.md").write_text("---\nbase_model: nobody/base-1B\n---\n")
    (folder / "judge.py").write_text(REWARD)
    prompts = tiny.prompt_file(folder / "prompts.parquet")
    held_out = tiny.prompt_file(folder / "held_out.parquet", prompts=2)
    pd.read_parquet(held_out).assign(data_source=HOSTILE).to_parquet(held_out)
    reward = f"{folder}/judge.py:score"
    config = tiny.config(
        folder,
        run__name="shared",
        data__system_prompt=HOSTILE,
        data__max_prompt_tokens=400,
        reward={"function": reward, "options": {reward: {"api_key": KEY}}},
        validation__data=str(held_out),
        train__iterations=1,
    )
    assert str(prompts) in config.data.train
    train(config)
    train(config.with_values({"train.iterations": 2, "actor.lr": 0.002}))


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        yield server


@pytest.fixture
def online(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """A hub that this process uses, with a token that may write."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", WRITES)
    return hub


@pytest.fixture
def pushed(hub: Hub, shared: Run, tmp_path: Path) -> Push:
    """Runs `ratchet push shared ARGUMENTS` as a user does, in a process that knows the hub by its environment."""

    def pushed(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        settings = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home"), **environment}
        command = [
            sys.executable,
            "-m",
            "ratchet.flows.commands.app",
            "push",
            *arguments,
            "--store",
            shared.store.url.rpartition("/")[0],
        ]
        return subprocess.run(command, capture_output=True, text=True, env=clean | settings, check=False)

    return pushed


@pytest.fixture
def exported(shared: Run, processes: Processes, tmp_path: Path) -> Callable[..., Path]:
    """Runs `ratchet export shared`; gives the folder."""

    def exported(*options: object) -> Path:
        folder, store = tmp_path / "exported", shared.store.url.rpartition("/")[0]
        child = processes.cli("export", "shared", folder, "--store", store, *options)
        assert child.wait() == 0, child.text
        return folder

    return exported


def digests(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_export_has_a_model_card(exported: Callable[..., Path], shared: Run) -> None:
    folder = exported("--iteration", 1)
    text = (folder / "README.md").read_text()
    card = ModelCard.load(folder / "README.md")
    assert card.data.to_dict() == {
        "base_model": ["nobody/base-1B"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "ppo", "ratchet"],
    }
    assert validated(text) == {"errors": [], "warnings": []}
    checkpoint = shared.exportable(1)
    before, after = (shared.store.validation_metrics(version) for version in (0, 1))
    claim = shared.store.iteration_state(0).claim
    assert claim is not None
    for fact in (
        "policy of the run `shared` after 1 iteration ",
        "| KL to the reference | in the reward, coefficient 0.01, estimator `k1` |",
        "| reward | `…/judge.py:score` |",
        "| updates of the policy | 1, one in each iteration |",
        "| trained on the prompts of | `prompts.parquet` |",
        "| metric | before training | after 1 iteration |",
        f"| {before[MEAN_SCORE]:.4g} | {after[MEAN_SCORE]:.4g} |",
        f"`{checkpoint.weights.digest}`",
        "`ratchet export shared DIR --iteration 1`",
        f"torch {claim.packages['torch']}",
    ):
        assert fact in text.replace("\n", " ")

    config = yaml.safe_load(text.partition("yaml\n")[2].rpartition("\n````")[0])
    assert config["actor"]["lr"] == 0.001, "that of the driver that made these weights, not of the newest one"
    assert config["data"]["system_prompt"] == HOSTILE
    assert config["model"]["path"] == "…/model"
    assert config["reward"]["options"] == {"…/judge.py:score": {"api_key": "(left out)"}}
    for path, data in contents(folder).items():
        for private in (KEY, str(Path(shared.store.url.removeprefix("file://")).parents[1])):
            assert private.encode() not in data, path
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_the_code_in_a_card_runs(exported: Callable[..., Path]) -> None:
    folder = exported("--iteration", 1)
    assert f"messages = {json.dumps([{'role': 'system', 'content': HOSTILE}])[:-1]}" in cards.code(folder, "python")
    assert cards.printed(folder).strip()


@pytest.mark.parametrize("umask", [0o022, 0o027], ids=oct)
def test_what_people_are_given_has_the_mode_that_the_umask_says(shared: Run, tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "given"
    with modes.umask(umask):
        for role in ("actor", "critic"):
            shared.export(2, folder / role, role)
        report.write([shared], folder / "report.html")
        write_parquet(pa.table({"prompt": ["a"]}), str(folder / "rows.parquet"))
        tables.write(shared.trajectories(columns=["response"])[["response"]], folder / "answers.parquet")
        objects = ObjectStore(f"file://{folder}/store")
        objects.put("metrics/row", b"1")
        objects.create("log/0", b"1")
    assert {path.name for path in folder.iterdir()} > {"actor", "report.html", "answers.parquet", "store"}
    assert modes.others(folder, umask) == {}


def test_names_in_a_card_are_never_markup(exported: Callable[..., Path]) -> None:
    text = (exported() / "README.md").read_text().partition("\n---\n")[2]
    reader = MarkdownIt("commonmark", {"html": True}).enable("table")
    kinds: list[str] = []
    html: list[str] = []
    for token in reader.parse(text):
        for inner in [token, *(token.children or ())]:
            kinds.append(inner.type)
            if inner.type in ("html_block", "html_inline"):
                html.append(inner.content.strip())
    assert html == ["<details>\n<summary>Config</summary>", "</details>"]
    assert not {"image", "link_open"} & set(kinds)
    assert kinds.count("heading_open") == 4
    rendered = reader.render(text)
    shown = rendered.partition("<code>val-core/")[2].partition("</code>")[0]
    expected = HOSTILE.replace("\n", " ").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert shown.startswith(expected.replace('"', "&quot;"))
    assert rendered.count("<td>") == 7 * 2 + 1 * 3, "a bar in a name is no border of a cell"


def test_a_critic_has_a_card_of_its_own(exported: Callable[..., Path]) -> None:
    folder = exported("--role", "critic")
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "token-classification"
    assert "This is the value model" in card.text
    assert "AutoModelForTokenClassification" in card.text
    assert AutoModelForTokenClassification.from_pretrained(folder).config.num_labels == 1


def test_damage_elsewhere_costs_an_export_only_its_card(shared: Run, processes: Processes, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "shared"
    shutil.copytree(shared.store.url.removeprefix("file://"), folder)
    [manifest] = (folder / "manifests" / "iteration=000000").glob("validate.*")
    manifest.unlink()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_text("the card of other weights")
    child = processes.cli("export", "shared", tmp_path / "model", "--store", f"file://{folder.parent}")
    assert child.wait() == 0, child.text
    assert f"the folder gets no model card: file://{manifest}" in child.text
    assert "model.safetensors" in contents(tmp_path / "model")
    assert "README.md" not in contents(tmp_path / "model")


def test_a_push_uploads_what_an_export_writes(
    pushed: Push, hub: Hub, exported: Callable[..., Path], tmp_path: Path
) -> None:
    done = pushed("shared", "me/policy", "--best", HF_TOKEN=WRITES)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"the actor after 2 iterations is at {hub.url}/me/policy (private)\n"
    [(name, repository)] = hub.repositories.items()
    assert (name, repository.private) == ("me/policy", True)
    assert repository.messages == ["actor after 2 iterations of shared"]
    assert digests(repository.files) == digests(contents(exported("--best")))
    assert "PUT /large/" + digests(repository.files)["model.safetensors"] in hub.requests
    for path, data in repository.files.items():
        (tmp_path / path).write_bytes(data)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters()
    assert AutoTokenizer.from_pretrained(tmp_path)("ab")["input_ids"]


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (("shared", "me/policy"), {}, "there is no token for the hub: log in with `hf auth login`, or set HF_TOKEN"),
        (
            ("shared", "me/policy"),
            {"HF_TOKEN": WRITES, "HF_HUB_OFFLINE": "1"},
            "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE",
        ),
        (("shared", "a/b/c"), {"HF_TOKEN": WRITES}, "a/b/c is not a name of a repository (owner/name)"),
        (("nowhere", "me/policy"), {"HF_TOKEN": WRITES}, "there is no run at"),
        (("shared", "me/policy", "--iteration", "7"), {"HF_TOKEN": WRITES}, "existing snapshots: 1, 2"),
        (("shared", "me/policy", "--adapter"), {"HF_TOKEN": WRITES}, "leave --adapter out"),
        (("shared", "me/policy", "--best", "--iteration", "1"), {"HF_TOKEN": WRITES}, "give only one"),
        (("shared", "me/policy"), {"HF_TOKEN": READS}, "does not let this token write to me/policy"),
        (("shared", "others/policy"), {"HF_TOKEN": WRITES}, "does not let this token write to others/policy"),
        (("shared", "me/policy"), {"HF_TOKEN": "hf_expired"}, "does not let this token write to me/policy"),
    ],
)
def test_a_push_that_cannot_be_is_refused_in_one_line(
    pushed: Push, hub: Hub, arguments: tuple[str, ...], environment: dict[str, str], says: str
) -> None:
    refused = pushed(*arguments, **environment)
    assert refused.returncode == 2, refused.stderr
    assert says in refused.stderr
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1
    assert not hub.repositories


def test_a_hub_that_does_not_answer_is_one_line(shared: Run, online: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(constants, "ENDPOINT", nobody)
    with pytest.raises(RatchetError, match=f"^cannot reach {nobody}: .*Connection refused") as refused:
        push(shared, "me/policy", 2)
    assert "\n" not in str(refused.value)


def test_what_the_hub_says_about_an_upload_is_repeated(shared: Run, online: Hub) -> None:
    online.is_full = True
    with pytest.raises(UserError, match=r"write to me/policy \(Private repository storage limit reached\)") as refused:
        push(shared, "me/policy", 2)
    assert "\n" not in str(refused.value)


def test_a_public_repository_takes_a_push_only_if_it_is_meant(shared: Run, online: Hub) -> None:
    online.repositories["me/policy"] = Repository(private=False)
    with pytest.raises(UserError, match="/me/policy is public: add --public"):
        push(shared, "me/policy", 2)
    assert not online.repositories["me/policy"].files
    assert not push(shared, "policy", 2, public=True).private
    assert "model.safetensors" in online.repositories["me/policy"].files
    assert not push(shared, "new", 2, public=True).private, "a new one is made public"


def test_a_push_replaces_weights_of_another_layout_and_leaves_other_files(shared: Run, online: Hub) -> None:
    old = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json", "NOTES.md")
    online.repositories["me/policy"] = Repository(private=True, files=dict.fromkeys(old, b"old"))
    push(shared, "me/policy", 2)
    files = online.repositories["me/policy"].files
    assert files.keys() & set(old) == {"NOTES.md"}
    assert files["model.safetensors"] != b"old"
    before = dict(files)
    push(shared, "me/policy", 2)
    assert online.repositories["me/policy"].files == before


def trajectories_of(server: Hub, name: str) -> dict[str, pd.DataFrame]:
    """The rows of a pushed dataset, by file."""
    files = server.repositories[name].files
    return {path: pd.read_parquet(io.BytesIO(files[path])) for path in sorted(files) if path.endswith(".parquet")}


def test_trajectories_are_pushed_as_a_dataset(pushed: Push, hub: Hub, shared: Run, tmp_path: Path) -> None:
    done = pushed("shared", "me/rows", "--trajectories", HF_TOKEN=WRITES)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"the trajectories of 2 iterations are at {hub.url}/datasets/me/rows (private)\n"
    repository = hub.repositories["datasets/me/rows"]
    assert repository.private
    assert sorted(repository.files) == [
        "README.md",
        *(f"data/train-00000{iteration}.parquet" for iteration in (0, 1)),
        *(f"data/validation-00000{iteration}.parquet" for iteration in (0, 1, 2)),
    ]
    card = repository.files["README.md"].decode()
    assert validated(card) == {"errors": [], "warnings": []}
    for private in (KEY, str(Path(shared.store.url.removeprefix("file://")).parents[1])):
        assert private not in card

    load = (
        "import datasets, sys; found = datasets.load_dataset('me/rows')\n"
        "for split in found: found[split].to_parquet(f'{sys.argv[1]}/{split}.parquet')"
    )
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "h"), "HF_TOKEN": READS}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    subprocess.run([sys.executable, "-c", load, str(tmp_path)], env=clean | settings, check=True)
    train, validation = (pq.read_table(tmp_path / f"{split}.parquet") for split in ("train", "validation"))
    expected = shared.trajectories([0, 1])
    rows = frame_of(train).set_index("trajectory_id").loc[expected["trajectory_id"]].reset_index()
    assert set(expected.columns) - set(rows.columns) == set()
    for name in expected.columns:
        assert all(map(same, rows[name], expected[name])), name
    assert rows["advantages"].map(len).tolist() == rows["response_ids"].map(len).tolist()
    assert train.schema.remove_metadata() == validation.schema.remove_metadata()
    expected = shared.validation()
    assert frame_of(validation)["response"].tolist() == expected["response"].tolist()
    assert sorted(set(validation["iteration"].to_pylist())) == [0, 1, 2]
    assert validation["advantages"].null_count == len(validation)


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)  # type: ignore[arg-type]
    return one == other or (pd.isna(one) and pd.isna(other))  # type: ignore[call-overload]


def test_a_push_of_trajectories_that_was_interrupted_continues(
    shared: Run, online: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushes, "COMMIT_FILES", 1)
    online.most_commits = 1
    with pytest.raises(UserError, match="Private repository storage limit reached"):
        push_trajectories(shared, "me/rows")
    assert list(trajectories_of(online, "datasets/me/rows")) == [
        "data/train-000000.parquet",
        "data/validation-000000.parquet",
    ]
    uploads = [request for request in online.requests if request.startswith("PUT")]
    online.most_commits = 100
    push_trajectories(shared, "me/rows")
    whole = trajectories_of(online, "datasets/me/rows")
    assert len(whole) == 5 and sum(map(len, whole.values())) == len(shared.trajectories([0, 1])) + len(
        shared.validation()
    )
    online.requests.clear()
    push_trajectories(shared, "me/rows")
    assert not [request for request in online.requests if request.startswith("PUT")], "nothing is uploaded twice"
    assert len(uploads) == len(set(uploads)) > 0


def test_columns_are_left_out_of_pushed_trajectories(shared: Run, online: Hub) -> None:
    push_trajectories(shared, "me/rows", without=["prompt", "messages"])
    for frame in trajectories_of(online, "datasets/me/rows").values():
        assert not {"prompt", "messages"} & set(frame.columns) and "response" in frame
    assert (
        "Columns that were left out: `prompt`, `messages`"
        in online.repositories["datasets/me/rows"].files["README.md"].decode()
    )
    for column, says in (("promt", "there is no column promt"), ("trajectory_id", "trajectory_id tells rows apart")):
        with pytest.raises(UserError, match=says):
            push_trajectories(shared, "me/other", without=[column])
    assert "datasets/me/other" not in online.repositories


def test_images_are_pushed_as_images(online: Hub, tmp_path: Path) -> None:
    run = observed(f"file://{tmp_path}/runs", "pictures")
    push_trajectories(run, "me/pictures")
    card = online.repositories["datasets/me/pictures"].files["README.md"].decode()
    assert validated(card) == {"errors": [], "warnings": []}
    assert (
        "| `images` | `list<item: struct<bytes: binary, path: string>>` | images among the tokens, in order |" in card
    )
    load = (
        "import datasets; rows = datasets.load_dataset('me/pictures', split='train')\n"
        "print(rows.features['images'], [[image.size for image in row['images']] for row in rows])"
    )
    settings = {"HF_ENDPOINT": online.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "h"), "HF_TOKEN": READS}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", load], env=clean | settings, check=True, capture_output=True, text=True
    )
    step = [[(24, 16)], [(24, 16), (24, 16)], [(900, 600)]]
    assert done.stdout == f"List(Image(mode=None, decode=True)) {[*step, *step]}\n"
    push_trajectories(run, "me/words", without=["images"])
    for path, data in online.repositories["datasets/me/words"].files.items():
        assert picture("red") not in data, path
        assert not path.endswith(".parquet") or "images" not in pq.read_schema(io.BytesIO(data)).names
    Path(run.store.url.removeprefix("file://"), "images", sha256_of(picture("red"))).unlink()
    with pytest.raises(UserError, match="is missing: restore it from a backup"):
        push_trajectories(run, "me/lost")


def test_trajectories_are_not_a_model(pushed: Push, hub: Hub) -> None:
    for arguments, says in (
        (("--trajectories", "--best"), "leave out"),
        (("--without", "prompt"), "add --trajectories"),
    ):
        refused = pushed("shared", "me/rows", *arguments, HF_TOKEN=WRITES)
        assert refused.returncode == 2 and says in refused.stderr
    assert not hub.repositories


def test_a_model_with_code_of_its_own_is_shared_with_it(
    workspace: Path, tmp_path: Path, prefect_server: str, online: Hub, processes: Processes
) -> None:
    shutil.copytree(workspace, tmp_path / "own")
    model = tiny.with_own_code(tmp_path / "own" / "model")
    (model / "added_tokens.json").write_text("{}")
    (model / "notes.py").write_text("raise AssertionError('no module imports it')")
    config = tiny.config(
        tmp_path / "own",
        model__trust_remote_code=True,
        algorithm__advantage="grpo",
        algorithm__kl__in_reward=None,
        train__iterations=1,
    )
    train(config)
    run = open_run(f"{config.run.store}/tiny")
    exported = run.export(1, tmp_path / "exported")
    assert {*tiny.OWN_CODE, "added_tokens.json"} <= {path.name for path in exported.iterdir()}
    assert not (exported / "notes.py").exists()
    push(run, "me/own", 1)
    assert online.repositories["me/own"].files.keys() >= {*tiny.OWN_CODE, "added_tokens.json"}
    model.rename(tmp_path / "elsewhere")

    loaded = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(exported, trust_remote_code=True)
    assert (type(loaded).__name__, type(tokenizer).__name__) == ("OwnForCausalLM", "OwnTokenizer")
    written = load_file(exported / "model.safetensors")
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in written.items())
    evaluate = ("evaluate", exported, "--data", workspace / "held_out.parquet", "--max-response-tokens", 8)
    refused = processes.cli(*evaluate)
    assert refused.wait() == 2, refused.text
    assert "has Python code of its own, which it needs: read it, and set model.trust_remote_code=true" in refused.text
    assert "Traceback" not in refused.text
    answered = processes.cli(*evaluate, "model.trust_remote_code=true", "reward.function=countdown")
    assert answered.wait() == 0, answered.text
