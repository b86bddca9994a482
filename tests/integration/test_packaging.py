"""What users install, in a folder that has `tasks`, `flows`, `infra`, `rlhf` and `tests` of its own."""

from __future__ import annotations

import os
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient

import ratchet
from ratchet.infra.runs.run import Run, open_run
from ratchet.infra.store.run_store import REPORT
from tests import tiny
from tests.extras import needs
from tests.packaged import ROOT, build, environment

FOLDERS = ("flows", "infra", "rlhf", "tasks")
REWARD = """
def letters(data_source, solution_str, ground_truth, extra_info=None):
    return sum(letter.isalpha() for letter in solution_str) / max(len(solution_str), 1)
"""


@dataclass(frozen=True)
class Installed:
    """An environment with Ratchet in it, and a user's folder."""

    environment: Path
    folder: Path

    def run(self, program: str, *arguments: str) -> str:
        """The output of a program of the environment, run in the user's folder, which comes first on its path."""
        variables = os.environ | {"PYTHONPATH": ".", "RAY_ADDRESS": "local", "COLUMNS": "200"}
        command = [str(self.environment / "bin" / program), *arguments]
        done = subprocess.run(command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def config(self, workspace: Path, name: str, **changes: object) -> str:
        """The name of a config in the user's folder, whose reward is there, too."""
        values: dict[str, object] = {
            "run__name": name,
            "run__store": "file://./runs",
            "reward__function": "tasks:letters",
        }
        config = tiny.config(workspace, **values | {"train__iterations": 1} | changes)
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        return f"{name}.yaml"

    def opened(self, name: str) -> Run:
        return open_run(f"file://{self.folder}/runs/{name}")


@pytest.fixture(scope="module")
def source_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    return folder / build("sdist", ROOT, folder)


@pytest.fixture(scope="module")
def wheel(source_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the source archive builds, as a registry's users get it."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(source_archive) as archive:
        archive.extractall(folder, filter="data")
    [unpacked] = folder.iterdir()
    return folder / build("wheel", unpacked, folder)


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp(request.param)
    is_wheel = request.param == "wheel"
    package = request.getfixturevalue("wheel") if is_wheel else folder / build("editable", ROOT, folder)
    return Installed(environment(folder / "environment", package), _users_folder(folder / "project"))


def _users_folder(folder: Path) -> Path:
    """A reward in `tasks.py`; the other modules have Ratchet's former names, and nothing may import them."""
    for name in ("flows", "infra", "rlhf", "tests"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('{name} is the user\\'s own')\n")
    (folder / "tasks.py").write_text(REWARD)
    return folder


def test_archives_hold_what_is_ratchets_once(source_archive: Path, wheel: Path) -> None:
    with tarfile.open(source_archive) as archive:
        members = archive.getmembers()
    packed = [member.name.partition("/")[2] for member in members]
    assert len(set(packed)) == len(packed)
    assert all(member.isfile() for member in members), "no links, which Windows could not unpack"
    assert not {name.partition("/")[0] for name in packed} & {*FOLDERS, "build", "dist", "runs", ".venv"}
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS, "examples"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    modules = {f"ratchet/{name}" for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    assert modules <= {name.removeprefix("src/") for name in packed}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name for name in names if not name.startswith("ratchet_rlhf-")} >= {*modules, "ratchet/__init__.py"}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"ratchet", "ratchet_rlhf"}
    assert f"ratchet_rlhf-{ratchet.__version__}.dist-info/licenses/LICENSE" in names


def test_an_archive_of_a_clone_whose_path_git_would_ignore(tmp_path: Path) -> None:
    clone = tmp_path / "build" / "ratchet"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(clone)], check=True)
    (clone / "build").mkdir()
    (clone / "build" / "link").symlink_to("/etc/hostname")
    with tarfile.open(tmp_path / build("sdist", clone, tmp_path)) as archive:
        assert not [name for name in archive.getnames() if name.split("/")[1] == "build"]


def test_every_public_name_is_imported(installed: Installed) -> None:
    script = f"""
import sys, ratchet
for name in ratchet.__all__:
    getattr(ratchet, name)
print(ratchet.__file__, *({{*{FOLDERS}, "tests"}} & sys.modules.keys()))
"""
    printed = installed.run("python", "-c", script).split()
    prefix = ROOT / "src" if "editable" in str(installed.environment) else installed.environment
    assert len(printed) == 1, "nothing of the user's"
    assert Path(printed[0]).is_relative_to(prefix)
    assert installed.run("ratchet", "--version") == f"ratchet {ratchet.__version__}\n"


def test_a_demo_runs_what_its_user_changed(installed: Installed) -> None:
    """CI runs the whole demo from a wheel: .ci/run."""
    script = installed.folder / "examples" / "guess" / "run.sh"
    script.parent.mkdir(parents=True)
    script.write_text("ratchet --version; python examples/guess/guess.py data/guess; cat data/guess/sft.jsonl | wc -l")
    copied, kept, version, *_ = installed.run("ratchet", "demo", "guess").splitlines()
    assert kept == "kept, though the package has others: examples/guess/run.sh"
    assert version == f"ratchet {ratchet.__version__}", "the program of this environment, which is not active"
    assert (installed.folder / "data" / "guess" / "sft.jsonl").exists()
    shipped = subprocess.run(["git", "ls-files", "examples"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in shipped.stdout.splitlines():
        same = (installed.folder / name).read_bytes() == (ROOT / name).read_bytes()
        assert same == (name != "examples/guess/run.sh"), name
    assert copied == f"{len(shipped.stdout.splitlines()) - 1} files of the examples are in {script.parents[1]}"


def test_a_run_and_its_deployment(installed: Installed, workspace: Path, prefect_server: str) -> None:
    path = installed.config(workspace, "plain")
    installed.run("ratchet", "train", path)
    assert "plain" in installed.run("ratchet", "ls")
    run = installed.opened("plain")
    assert run.state.iteration == 1
    assert run.trajectories()["score"].between(0, 1).all()

    pool = installed.environment.parent.name
    installed.run("ratchet", "deploy", path, "--pool", pool)
    with SyncPrefectClient(prefect_server) as client:
        deployed = {name: client.read_deployment_by_name(f"{name}/plain") for name in ("train", "report")}
        entrypoints = {name: deployment.entrypoint for name, deployment in deployed.items()}
        assert entrypoints == {"train": "ratchet.flows.train.train", "report": "ratchet.flows.deploy.report"}
        more = {"overrides": ["train.iterations=2"]}
        asked = [
            client.create_flow_run_from_deployment(deployed["train"].id, parameters=more).id,
            client.create_flow_run_from_deployment(deployed["report"].id).id,
        ]
        installed.run("ratchet", "worker", "--pool", pool, "--once")
        ended = [client.read_flow_run(flow_run) for flow_run in asked]
    assert [flow_run.state_name for flow_run in ended] == ["Completed", "Completed"], ended
    assert installed.opened("plain").state.iteration == 2
    assert (installed.folder / "runs" / "plain" / REPORT).exists()


@needs("ray")
def test_a_run_on_ray(installed: Installed, workspace: Path, prefect_server: str) -> None:
    path = installed.config(workspace, "on-ray", pools={"train": {"workers": 1}})
    assert "starting pool train" in installed.run("ratchet", "train", path)
    assert installed.opened("on-ray").state.iteration == 1
