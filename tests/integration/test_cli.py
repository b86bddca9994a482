"""The command line, as a user types it: what it prints, and the exit codes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import tomllib
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
import yaml

from ratchet.flows.commands import app
from ratchet.flows.commands.console import console
from ratchet.flows.commands.doctor import EXTRAS
from ratchet.infra.runs.run import open_run
from ratchet.rlhf.errors import UserError
from tests import tiny
from tests.processes import Processes
from tests.tiers import sampled

ROOT = Path(__file__).parents[2]


class Ratchet:
    """Runs a command in this process; gives its exit code and what it printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capfd = monkeypatch, capfd

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self.monkeypatch.setattr("sys.argv", ["ratchet", *map(str, arguments)])
        self.capfd.readouterr()
        try:
            app.main()
            code = 0
        except SystemExit as exit:
            code = int(exit.code or 0)
        out, err = self.capfd.readouterr()
        return code, out, err


@pytest.fixture
def ratchet(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], prefect_server: str) -> Ratchet:
    monkeypatch.setattr(console, "_width", 160)
    return Ratchet(monkeypatch, capfd)


@pytest.fixture
def config_file(workspace: Path, tmp_path: Path) -> Path:
    config = tiny.config(
        workspace,
        run__name="cli",
        run__store=f"file://{tmp_path}/runs",
        reward__function="tests.rewards:letters",
        validation__data=str(workspace / "held_out.parquet"),
        train__iterations=2,
    )
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


@pytest.mark.promise
def test_a_run_from_training_to_export(ratchet: Ratchet, config_file: Path, tmp_path: Path) -> None:
    store = ("--store", f"file://{tmp_path}/runs")
    code, out, _ = ratchet("train", config_file, "train.iterations=1")
    assert code == 0
    assert "it    0/1" in out
    code, out, _ = ratchet("train", config_file)
    assert code == 0
    assert "continues with different settings from iteration 1 on: train.iterations 1 -> 2\n" in out
    assert "it    1/2" in out
    assert "run cli has its 2 iterations" in out

    code, out, _ = ratchet("train", config_file)  # done already: nothing runs again
    assert code == 0
    assert "it    1/2" not in out
    assert "different settings" not in out

    code, out, _ = ratchet("train", config_file, "--dry-run", "actor.lr=1")
    assert code == 0
    assert "different settings from iteration 2 on: actor.lr 0.001 -> 1.0" in out
    assert ": nothing is left to train, it has 2 of 2 iterations: train.iterations=3 or more continues it\n" in out
    for dry in ([], ["--dry-run"]):
        code, _, err = ratchet("train", config_file, "actor.lr=1", "train.iterations=1", *dry)
        has = "run cli has 2 iterations, more than train.iterations 1"
        assert (code, err) == (2, f"error: {has}: set train.iterations=3 or more to continue it\n")
    assert open_run(f"{store[1]}/cli").config.actor.lr == 0.001, "settings of what is not trained are not recorded"

    code, out, _ = ratchet("status", "cli", *store)
    assert code == 0
    assert "2 of 2 iterations" in out
    assert out.count("✓") > 16
    assert "snapshots after iterations: 1, 2" in out
    assert "no driver is at work" in out

    code, _, err = ratchet("export", "cli", config_file, *store)
    assert (code, err) == (2, f"error: cannot write a folder at {config_file}: File exists\n")

    code, out, _ = ratchet("show", "cli", *store, "--where", "score >= 0", "--limit", 3, "--format", "json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert len(rows) == 3
    assert rows[0]["trajectory_id"] == "it000001-p00000-s00"
    for format in ("table", "csv", "md"):
        code, out, _ = ratchet(
            "show", "cli", *store, "--iteration", 0, "--columns", "response,score", "--format", format
        )
        assert code == 0
        assert "score" in out

    code, out, _ = ratchet("export", "cli", tmp_path / "model", *store)
    assert code == 0
    code, out, _ = ratchet(
        *("evaluate", tmp_path / "model", "--data", config_file.parent / "none.parquet", "--reward", "constant")
    )
    assert code == 2
    held_out = json.loads((tmp_path / "model" / "config.json").read_text())
    assert held_out["model_type"] == "llama"

    answers = tmp_path / "answers.parquet"
    code, out, said = ratchet("evaluate", "cli", *store, "--iteration", 1, "--n", 2, "--output", answers)
    assert code == 0
    assert "continues without Prefect" not in out + said
    assert "countdown" in out
    assert len(pd.read_parquet(answers)) == 6

    assert ratchet("evaluate", "cli", *store, "--output", answers)[0] == 0
    validated = open_run(f"file://{tmp_path}/runs/cli").validation().query("iteration == 2")
    again = pd.read_parquet(answers)
    for column in ("response", "score"):
        assert list(again[column]) == list(validated[column]), "the answers are those of the run's own validation"


def test_a_run_does_not_become_another_one_by_accident(
    ratchet: Ratchet, config_file: Path, workspace: Path, tmp_path: Path
) -> None:
    """Overrides that were forgotten would otherwise change what a run learns from."""
    assert (
        ratchet("train", config_file, "train.iterations=1", "rollout.n=4", "algorithm.loss.clip_ratio_low=0.1")[0] == 0
    )
    run = f"file://{tmp_path}/runs/cli"
    slot = open_run(run).state.slot
    other = workspace / "held_out.parquet"
    changed = ("train.iterations=2", f"data.train=[{other}]", "reward.function=constant")
    code, out, err = ratchet("train", config_file, *changed)
    assert code == 2
    assert "starting Prefect" not in out, "it is refused before anything slow starts"
    for difference in (
        f"data.train [{workspace / 'prompts.parquet'}] -> [{other}]",
        "reward.function tests.rewards:letters -> constant",
        "rollout.n 4 -> 2",
        "algorithm.loss.clip_ratio_low 0.1 -> 0.2",
    ):
        assert difference in err
    assert "train.iterations" not in err
    assert err.count("\n") == 2
    assert open_run(run).state.slot == slot
    assert "--accept-changes" not in err, "the validation before iteration 1 has old scores"
    fork = re.search(r"`ratchet (fork cli --at 1:validate --run) NEW`", err)
    assert fork is not None
    store = ("--store", f"file://{tmp_path}/runs")
    assert ratchet(*fork[1].split(), "other", *store, *changed)[0] == 0

    changed = (*changed, "validation.data=null")
    assert ratchet("train", config_file, "--run", "plain", "train.iterations=1", "validation.data=null")[0] == 0
    code, out, err = ratchet("train", config_file, "--run", "plain", *changed)
    assert code == 2
    assert err.endswith("or continue with the run's own settings (`ratchet resume plain`), or add --accept-changes\n")
    assert ratchet("resume", "plain", *store)[0] == 0
    code, out, err = ratchet("train", config_file, "--run", "plain", *changed, "--accept-changes")
    assert code == 0, err
    assert f"data.train [{workspace / 'prompts.parquet'}] -> [{other}]" in out, "lists are printed, too"
    assert open_run(f"file://{tmp_path}/runs/plain").state.iteration == 2


@pytest.mark.promise
def test_a_dry_run_says_what_would_happen_and_writes_nothing(
    ratchet: Ratchet, config_file: Path, tmp_path: Path
) -> None:
    code, out, err = ratchet("train", config_file, "--dry-run", "pools={gpus: {workers: 4}}", "actor.engine=fsdp")
    assert code == 0, err
    for said in (
        f"run cli in file://{tmp_path}/runs: new, 2 iterations",
        "23.6 thousand parameters in float32, fsdp in pool gpus (4 workers); weights 23.6 kB, optimizer state 47.2 kB",
        "4 prompts x 2 = 8 trajectories in 2 shards, each of at most 200 + 8 tokens: 1.66 thousand tokens at most",
        "  memory    of each process of pool gpus, about:\n",
        "kB every iteration",
    ):
        assert said in out
    assert "starting Prefect" not in out
    assert not list((tmp_path / "runs").iterdir())
    code, _, err = ratchet("train", config_file, "--dry-run", "model.path=/nowhere")
    assert (code, err) == (
        2,
        "error: model.path /nowhere does not exist: name a model folder, or a model on the hub (owner/name)\n",
    )


def test_a_dry_run_asks_for_no_gpu(ratchet: Ratchet, config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")  # others may have a Ray on this machine
    pools = ("pools={gpus: {workers: 4, gpus_per_worker: 1}}", "actor.engine=fsdp")
    code, out, err = ratchet("train", config_file, "--dry-run", *pools, "--gpu", "h100x4")
    assert code == 0, err
    assert "  memory    of each process of pool gpus, which has 84.9 GB, about:\n" in out
    for options, mistake in (
        (("--dry-run", *pools, "--gpu", "h100x2"), "pools ask for 4 GPUs, but --gpu h100x2 has 2: name more, or lower"),
        (("--dry-run", "--gpu", "v100"), "--gpu v100 is unknown: name one of a10, a100-40gb"),
        (("--gpu", "h100"), "--gpu only compares a dry run with other GPUs: add --dry-run, or remove it"),
    ):
        code, _, err = ratchet("train", config_file, *options)
        assert code == 2
        assert err.startswith(f"error: {mistake}")


def test_a_name_is_what_was_typed(ratchet: Ratchet, config_file: Path, tmp_path: Path) -> None:
    """Not what YAML makes of it: here a date."""
    elsewhere = f"file://{tmp_path}/elsewhere"
    code, out, err = ratchet("train", config_file, "train.iterations=1", "--run", "2026-11-24", "--store", elsewhere)
    assert code == 0, err
    assert "run 2026-11-24 has its 1 iteration\n" in out
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["2026-11-24"]


def test_an_exported_model_gives_the_same_logits(ratchet: Ratchet, config_file: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert ratchet("train", config_file, "train.iterations=1", "validation.data=null")[0] == 0
    assert ratchet("export", "cli", tmp_path / "model", "--store", f"file://{tmp_path}/runs")[0] == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    run = open_run(f"file://{tmp_path}/runs/cli")
    with pytest.raises(UserError, match="snapshot 1 has no reference; it has: actor, critic"):
        run.export(1, tmp_path / "reference", "reference")
    checkpoint = run.store.checkpoint(run.state.snapshots[1]["actor"])
    saved = load(run.store.read_checkpoint(checkpoint, ["model.safetensors"])["model.safetensors"])
    assert all(torch.equal(parameter, saved[name]) for name, parameter in model.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("ab")["input_ids"]


def test_supervised_steps_lower_the_loss(ratchet: Ratchet, workspace: Path, tmp_path: Path) -> None:
    assert ratchet("data", "countdown", tmp_path, "--train", 40, "--test", 10, "--high", 9)[0] == 0
    train, test = (pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("train", "test"))
    assert (len(train), len(test)) == (40, 10)
    losses = []
    for steps in (1, 30):
        arguments: tuple[object, ...] = (
            "--data",
            tmp_path / "sft.parquet",
            "--output",
            tmp_path / f"model-{steps}",
            "--steps",
            steps,
        )
        arguments += ("--batch-examples", 16, "--lr", 0.01, "--store", f"file://{tmp_path}/runs")
        code, out, _ = ratchet("sft", "--model", workspace / "model", *arguments)
        assert code == 0
        losses.append(float(out.rsplit("(loss ", 1)[1].split(")")[0]))
    assert losses[1] < losses[0] - 0.5
    assert (tmp_path / "model-30" / "model.safetensors").exists()


@sampled(4)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("train", "none.yaml"), "cannot read the config none.yaml"),
        (("train", "{config}", "actor.lrr=1"), "actor.lrr is not a key of the config"),
        (("train", "{config}", "critic.mini_batch_trajectories=64"), "more than an iteration has"),
        (("train", "{config}", "critic=null"), "critic is null, but algorithm.advantage gae needs values"),
        (("train", "{config}", "model.path=./nowhere"), "model.path ./nowhere does not exist"),
        (("train", "{config}", "data.train=[nowhere.parquet]"), "nowhere.parquet does not exist"),
        (("train", "{config}", "reward.function=nowhere"), "reward.function nowhere"),
        (
            ("train", "{config}", "reward.function=gsm8k", "reward.options.methd=strict"),
            "extra_info=, **reward.options): got an unexpected keyword argument 'methd'",
        ),
        (
            ("train", "{config}", "reward.function=gsm8k", "reward.options={{gsm8k: {{method: Strict}}}}"),
            "reward.options.gsm8k.method 'Strict': Input should be 'strict' or 'flexible'",
        ),
        (
            ("train", "{config}", "reward.function=ratchet.rlhf.rewards.code:compute_score"),
            "set reward.allow_code: true",
        ),
        (("train", "{config}", "data.train=[foo://x.parquet]"), "cannot read foo://x.parquet: Protocol not known: foo"),
        (("train", "{config}", "data.train=[{tmp}]"), "{tmp} has no data files: the formats are Parquet (.parquet), "),
        (("data", "gsm8k", "{tmp}", "--source", "foo://bar"), "--source foo://bar: "),
        (("data", "gsm8k", "{tmp}", "--source", "{tmp}/none"), "--source {tmp}/none does not exist"),
        (
            ("sft", "--model", "{model}", "--data", "foo://x.parquet", "--output", "{tmp}/o"),
            "cannot read foo://x.parquet",
        ),
        (("evaluate", "{model}", "--data", "{prompts}", "--reward", "code"), "set reward.allow_code: true"),
        (
            ("evaluate", "{model}", "--data", "{prompts}", "--reward", "constant", "data.max_prompt_tokens=20"),
            "more than data.max_prompt_tokens 20",
        ),
        (("status", "nowhere"), "there is no run at"),
        (("evaluate", "nowhere"), "there is no run at"),
        (("data", "countdown", "{tmp}", "--train", "1000000"), "exist"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    ratchet: Ratchet, config_file: Path, workspace: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    there = {"tmp": tmp_path, "model": workspace / "model", "prompts": workspace / "held_out.parquet"}
    filled = [argument.format(config=config_file, **there) for argument in arguments]
    code, _, err = ratchet(*filled)
    assert code == 2
    assert says.format(**there) in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


@pytest.mark.promise
def test_help_lists_every_key_of_the_config(ratchet: Ratchet) -> None:
    import subprocess
    import sys

    from ratchet.rlhf.config import RunConfig, keys

    command = [sys.executable, "-m", "ratchet.flows.commands.app", "train", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for key, *_ in keys(RunConfig):
        assert f"{key} = " in out


def test_doctor_tries_the_stores(ratchet: Ratchet) -> None:
    code, out, _ = ratchet("doctor")
    assert code == 0
    assert out.count("works") == 2


def test_doctor_says_what_is_missing_for_what(
    ratchet: Ratchet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert EXTRAS.keys() == extras.keys() - {"dev", "docs"}
    for package, version in (("optuna", "4.9"), ("torch", "2.6.0")):  # as if pip had put these here
        about = tmp_path / f"{package}-{version}.dist-info" / "METADATA"
        about.parent.mkdir()
        about.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, out, _ = ratchet("doctor")
    assert code == 0
    rows = {
        row[0]: row[1:]
        for row in ([cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines())
        if row
    }
    assert rows["needed by all"] == ["torch is 2.6.0, not >=2.13"]
    assert rows["sweep"] == ["ratchet sweep", "optuna is 4.9, not >=5"]
    assert rows["deepspeed"] == ["engine: deepspeed", f"deepspeed {importlib.metadata.version('deepspeed')}"]
    if find_spec("verifiers") is None:
        assert rows["verifiers"][1] == "verifiers is missing"


@pytest.mark.parametrize(("name", "code", "says"), [("nothing", 2, "there is no demo nothing"), ("guess", 7, "")])
def test_a_demo_ends_as_its_script_ends(processes: Processes, tmp_path: Path, name: str, code: int, says: str) -> None:
    (tmp_path / "examples" / "guess").mkdir(parents=True)
    (tmp_path / "examples" / "guess" / "run.sh").write_text("exit 7")
    child = processes.cli("demo", name, setup=partial(os.chdir, tmp_path))
    assert child.wait() == code
    assert says in child.text
