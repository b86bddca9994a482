"""A run that somebody else made: nothing that its config names runs without consent, whatever the command."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from starlette.testclient import TestClient

from ratchet.flows.commands.app import app as commands
from ratchet.flows.ui.documents import decoder
from ratchet.flows.ui.server import app as pages
from ratchet.infra.runs.run import open_run
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf import consent
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.model_folders import model_folder
from ratchet.rlhf.models.tokenizers import reading_tokenizer
from ratchet.rlhf.named import load_named
from tests import tiny
from tests.integration.test_cli import Ratchet
from tests.stored import STORED

RUN, CANARIES = "run", "canaries"
CODE = {
    "reward.py": "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n",
    "world.py": "class Environment:\n    stop = ()\n    def reset(self, *_): ...\n    def step(self, turn): ...\n",
    "program.py": "def run(task, base_url, api_key, model): ...\n",
}
TALKS: dict[str, dict[str, Any]] = {
    "environment": {"rollout.environment": "world.py:Environment"},
    "agent": {"rollout.agent": "program.py:run"},
}

LOOKS: dict[str, list[str]] = {
    "status": [RUN],
    "ls": [],
    "show": [RUN],
    "query": [RUN, "select count(*) from trajectories"],
    "compare": [RUN, RUN],
    "report": [RUN, "-o", "report.html"],
    "explain": [RUN, "1"],
    "dataset": [RUN, "-o", "rows.parquet", "--kind", "kto"],
    "export": [RUN, "exported"],
    "verify": [RUN],
    "vacuum": [RUN],
    "stop": [RUN],
}
"""Commands that only look, or move files."""
RUNS: dict[str, list[str]] = {
    "plan": [RUN],
    "resume": [RUN],
    "rollout-worker": [RUN],
    "fork": [RUN, "--at", "1:score", "--run", "new"],
    "sweep": [RUN, "--at", "1:update_actor", "--vary", "actor.lr=1e-5,1e-4"],
    "relabel": [RUN, "--run", "round"],
    "rescore": [RUN, "--run", "again"],
    "reproduce": [RUN, "--iteration", "0"],
    "whatif": [RUN, "--iterations", "0", "--set", "actor.lr=1e-4"],
    "evaluate": [RUN, "--data", "held_out.parquet"],
    "serve": [RUN, "--port", "0"],
}
"""Commands that run what the config names."""
REFUSED: dict[str, list[str]] = {
    "bisect": [RUN, "--reward", "constant"],  # has too few iterations
    "push": [RUN, "me/policy"],  # offline
    "ingest": [RUN, "-o", "ingested"],  # never served
}
"""Commands that refuse this run for other reasons."""
NEEDS_NO_RUN = {
    "train",
    "import",
    "ui",
    "data",
    "model",
    "convert",
    "sft",
    "reward-model",
    "deploy",
    "worker",
    "demo",
    "doctor",
}
"""Commands that take none; the page of `ui` has a test of its own."""


def hostile(folder: Path, talks: Mapping[str, Any]) -> RunConfig:
    """Copy a stored run into a folder, and let its newest config name code that leaves a file when it runs."""
    shutil.copytree(STORED, folder, dirs_exist_ok=True)
    (folder / CANARIES).mkdir()
    for name, code in CODE.items():
        (folder / name).write_text(f"{leaves(folder, name)}\n{code}")
    tiny.with_own_code(folder / "model", leaves(folder, "model"))
    store = RunStore.at(f"file://{folder}/{RUN}")
    config = open_run(store.url).config.with_values(
        {"model.trust_remote_code": True, "reward.function": "reward.py:compute_score", "reward.model": None, **talks}
    )
    log = store.log
    claim = log.read().claim
    assert claim is not None
    log.claim(claim.model_copy(update={"config": config.model_dump(mode="json")}))
    return config


def ran() -> set[str]:
    """What has run in the current folder."""
    return {path.name for path in Path(CANARIES).iterdir()}


def leaves(folder: Path, name: str) -> str:
    return f"open({str(folder / CANARIES / name)!r}, 'w').close()"


@pytest.fixture
def ratchet(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str]]:
    """Runs a command in `tmp_path`, with a home of its own; gives its exit code and all that it printed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("RATCHET_STORE", f"file://{tmp_path}")
    monkeypatch.chdir(tmp_path)
    run = Ratchet(monkeypatch, capfd)

    def told(*arguments: str) -> tuple[int, str]:
        code, out, err = run(*arguments)
        return code, out + err

    return told


def test_every_command_is_tried() -> None:
    table = typer.main.get_command(commands).commands  # type: ignore[attr-defined]
    assert {*LOOKS, *RUNS, *REFUSED, *NEEDS_NO_RUN} == set(table)
    trusting = {name for name, command in table.items() if any(p.name == "trust_code" for p in command.params)}
    assert trusting == {*RUNS, "bisect", "export", "push"}


@pytest.mark.slow
@pytest.mark.parametrize("talks", TALKS)
def test_no_command_runs_code_of_a_copied_run(
    ratchet: Callable[..., tuple[int, str]], tmp_path: Path, talks: str
) -> None:
    config = hostile(tmp_path, TALKS[talks])
    for name, arguments in {**LOOKS, **RUNS, **REFUSED}.items():
        code, told = ratchet(name, *arguments)
        assert not ran(), f"{name} ran code: {told}"
        assert "Traceback" not in told, told
        if name in RUNS:
            assert code == 2, f"{name}: {told}"
            assert len(told.strip().splitlines()) == 3, "reward, environment or agent, and model"
            assert "reward.function reward.py:compute_score" in told
            assert "add --trust-code, or set RATCHET_TRUST_CODE=1" in told
        elif name in LOOKS:
            assert code == 0, f"{name}: {told}"
        else:
            assert code == 2, f"{name}: {told}"
    assert (tmp_path / "exported" / "modeling_own.py").is_file()
    with TestClient(pages(f"file://{tmp_path}", "testserver")) as client:
        first = open_run(f"file://{tmp_path}/{RUN}").trajectories(0, ["trajectory_id"])["trajectory_id"][0]
        shown = client.get("/api/trajectory", params={"run": RUN, "iteration": 0, "id": first})
        assert shown.status_code == 200, shown.text
    with pytest.raises(UserError, match="needs Python code of its own, which does not run where a run is only read"):
        reading_tokenizer(config.model)
    assert decoder(open_run(f"file://{tmp_path}/{RUN}")) is None
    assert not ran()
    assert not (tmp_path / "state").exists()


def test_consent_is_asked_once_and_again_for_changed_code(
    ratchet: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    hostile(tmp_path, TALKS["environment"])
    code, told = ratchet("plan", RUN, "--trust-code")
    assert code == 0, told
    assert ran() == {"reward.py", "world.py", "model"}
    folder = tmp_path / "state" / "ratchet" / "trusted"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert ratchet("plan", RUN)[0] == 0, "remembered"
    with (tmp_path / "reward.py").open("a") as file:
        file.write("# changed\n")
    code, told = ratchet("plan", RUN)
    assert (code, told.count("has not run on this machine")) == (2, 1), told
    assert f"{tmp_path}/reward.py" in told
    assert ratchet("plan", RUN, "reward.function=constant")[0] == 0, "what the user changes is not asked for"


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_terminal_is_asked(
    ratchet: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    config = tiny.config(tmp_path, reward__function=f"{tmp_path}/reward.py")
    (tmp_path / "reward.py").write_text(CODE["reward.py"])
    user, terminal = pty.openpty()
    with os.fdopen(user, "r+b", buffering=0) as typed, os.fdopen(terminal, "w") as shown:
        monkeypatch.setattr(sys, "stderr", shown)
        with os.fdopen(os.dup(terminal)) as read:
            monkeypatch.setattr(sys, "stdin", read)
            typed.write(f"{answer}\n".encode())
            if answer == "n":
                with pytest.raises(UserError, match="add --trust-code"):
                    consent.require(config)
            else:
                consent.require(config)
                consent.require(config)  # reads nothing: it is remembered
        asked = ""
        while "[y/N]" not in asked:  # the terminal shows what was typed, too
            asked += os.read(user, 4096).decode()
    assert re.search(rf"reward\.function {tmp_path}/reward\.py \({tmp_path}/reward\.py, sha256 \w{{16}}\)", asked)


@pytest.mark.parametrize(
    "named",
    [
        {"reward.function": "package.inner:score"},
        {"rollout.environment": "subprocess:Popen"},
        {"rollout.tools": "program.py:run"},
        {"rollout.mcp": "touch file"},
        {"rollout.environment": "verifiers:package"},
        {"rollout.environment": "verifiers:somebody/the-package"},
        {"rollout.environment": "gymnasium:package.inner:World-v0"},
        {"rollout.environment": "gymnasium:package.py:World-v0"},
        {"reward": {"function": "code", "allow_code": True, "options": {"code": {"sandbox": "limits"}}}},
    ],
)
def test_everything_that_a_config_can_name_needs_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, Any]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "program.py").write_text(CODE["program.py"])
    for package in ("package", "the_package"):
        (tmp_path / package).mkdir()
        for name in ("__init__", "inner"):
            (tmp_path / package / f"{name}.py").write_text("raise AssertionError('it was imported')")
    config = tiny.config(tmp_path).with_values(named)
    with pytest.raises(UserError, match="the run's config names code that has not run on this machine"):
        consent.require(config)
    consent.give(config)
    consent.require(config)


def test_consent_to_a_command_covers_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    config = tiny.config(tmp_path, rollout__mcp="python server.py")
    (tmp_path / "server.py").write_text("# read\n")
    consent.give(config)
    consent.require(config)
    (tmp_path / "server.py").write_text("# another one, of the same name\n")
    with pytest.raises(UserError, match=rf"rollout\.mcp python server\.py \({tmp_path}/server\.py, sha256"):
        consent.require(config)


def test_consent_to_a_reward_is_none_to_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose arguments the policy chooses."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    consent.give(tiny.config(tmp_path, reward__function="subprocess:getoutput"))
    with pytest.raises(UserError, match=r"rollout\.tools subprocess:getoutput"):
        consent.require(tiny.config(tmp_path, rollout__tools="subprocess:getoutput"))


@pytest.mark.parametrize(("value", "trusts"), [("1", True), ("0", False), ("", False), ("false", False), ("no", False)])
def test_only_one_value_of_the_variable_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, trusts: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("RATCHET_TRUST_CODE", value)
    config = tiny.config(tmp_path, rollout__tools="subprocess:getoutput")
    if trusts:
        consent.require(config)
    else:
        with pytest.raises(UserError, match="set RATCHET_TRUST_CODE=1"):
            consent.require(config)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in the current folder, whose `inner` a config may name; and a home without consent."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "package").mkdir()
    for name in ("__init__", "inner"):
        (tmp_path / "package" / f"{name}.py").touch()
    return tmp_path / "package"


NAMED = {"reward.function": "package.inner:score"}
LIMITS = {"reward": {"function": "code", "allow_code": True, "options": {"code": {"sandbox": "limits"}}}}


@pytest.mark.parametrize(
    ("named", "change"),
    [
        (NAMED, {"reward.options": {"package.inner:score": {"path": "elsewhere"}}}),
        (
            {"rollout.environment": "package.inner:World"},
            {"rollout.environment": {"name": "package.inner:World", "options": {"a": 1}}},
        ),
        ({"rollout.mcp": "touch file"}, {"rollout.mcp": "touch other"}),
        (LIMITS, {"data.train": ["other.parquet"]}),
        (NAMED, "__init__.py"),
        (NAMED, "inner.py"),
    ],
)
def test_whatever_changes_what_runs_needs_consent_again(
    program: Path, tmp_path: Path, named: dict[str, Any], change: dict[str, Any] | str
) -> None:
    config = tiny.config(tmp_path).with_values(named)
    consent.give(config)
    consent.require(config)
    if isinstance(change, str):
        (program / change).write_text("# changed\n")
    else:
        config = config.with_values(change)
    with pytest.raises(UserError, match="has not run on this machine"):
        consent.require(config)


def test_only_a_set_variable_consents(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.config(tmp_path).with_values(NAMED)
    for value in ("", "0"):
        monkeypatch.setenv(consent.VARIABLE, value)
        with pytest.raises(UserError, match="has not run on this machine"):
            consent.require(config)
    monkeypatch.setenv(consent.VARIABLE, "1")
    consent.require(config)
    monkeypatch.delenv(consent.VARIABLE)
    consent.require(config)


def test_a_folder_that_comes_with_a_run_gives_no_consent(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.config(tmp_path).with_values(NAMED)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    consent.give(config)
    consent.require(config)
    monkeypatch.setenv("XDG_STATE_HOME", ".")
    monkeypatch.setenv("HOME", ".")
    with pytest.raises(UserError, match="has not run on this machine"):
        consent.require(config)


def test_a_name_cannot_write_to_the_terminal(program: Path, tmp_path: Path) -> None:
    """As one that hides the question, or what it asks about, would."""
    with pytest.raises(UserError) as refused:
        consent.require(tiny.config(tmp_path).with_values({"rollout.mcp": "evil\x1b[2K\rfriendly"}))
    assert "evil\\x1b[2K\\rfriendly" in str(refused.value)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("model", {}),
        ("critic.model", {}),
        ("reference.model", {}),
        ("teacher", {"algorithm.distillation": {}}),
        ("reward.model", {"reward.function": None}),
    ],
)
def test_every_model_may_bring_code(program: Path, tmp_path: Path, key: str, named: dict[str, Any]) -> None:
    """And if only models run, no other code is asked for."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "somebody/else--own.Config"}}))
    model = {"path": str(tmp_path / "own"), "dtype": "float32", "trust_remote_code": True}
    config = tiny.config(tmp_path).with_values(NAMED | {key: model} | named)
    refused = f"^the run's config names code that has not run on this machine, {key}.trust_remote_code .*$"
    with pytest.raises(UserError, match=re.compile(refused)):
        consent.require(config, models_only=True)
    consent.require(tiny.config(tmp_path).with_values(NAMED), models_only=True)
    consent.give(config)
    consent.require(config)


def test_built_ins_need_no_consent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    consent.require(tiny.config(tmp_path, rollout__environment="calculator", reward__function="countdown"))
    consent.require(tiny.config(tmp_path, rollout__environment="gymnasium:Game-v0", reward__function="auto"))
    consent.require(tiny.config(tmp_path, rollout__mcp="https://host/mcp"))


def test_code_is_compiled_from_what_was_read(tmp_path: Path) -> None:
    """A copied folder may hold a compiled file that has nothing to do with its source."""
    import importlib.util
    import py_compile

    source, other = tmp_path / "reward.py", tmp_path / "other.py"
    source.write_text("def compute_score():\n    return 'read'\n")
    other.write_text("def compute_score():\n    return 'hidden'\n")
    cached = importlib.util.cache_from_source(str(source))
    py_compile.compile(str(other), cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert load_named(str(source), "reward.function", "", ("compute_score",), ())() == "read"


def test_models_bring_their_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tiny.with_own_code(tiny.model_folder(tmp_path / "model"))
    config = tiny.config(tmp_path, model__trust_remote_code=True)
    assert model_folder(config.model) == folder
    consent.give(config)
    consent.require(config)
    (folder / "configuration_own.py").write_text("# imported by modeling_own.py\n")
    with pytest.raises(UserError, match=r"model\.trust_remote_code .* \(.*tokenization_own\.py and 2 more, sha256"):
        consent.require(config)
    # the store trusts the code of models, the user only names another model
    elsewhere = tiny.with_own_code(tiny.model_folder(tmp_path / "elsewhere"))
    (elsewhere / "configuration_own.py").write_text("# of yet another model\n")
    with pytest.raises(UserError, match=rf"model\.trust_remote_code {elsewhere}"):
        consent.require(config, config.with_values({"model.path": str(elsewhere)}))
