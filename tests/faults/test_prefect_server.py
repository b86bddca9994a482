"""The Prefect server dies and comes back while a run is at work: the run's log decides, Prefect only watches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.faults.proxy import Action, Rule, proxy
from tests.history import History
from tests.prefect_server import prefect_api

ANSWERS: tuple[Action, ...] = ("503", "429", "409", "slow", "never", "dropped before", "dropped after", "garbled")


def written(workspace: Path, folder: Path, name: str, iterations: int) -> tuple[RunConfig, list[str]]:
    """A run's config, and the command that drives it."""
    config = tiny.config(
        workspace,
        run__name=name,
        run__store=f"file://{folder}/runs",
        reward__function="tests.rewards:letters",
        train__iterations=iterations,
    )
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return config, [sys.executable, "-c", "from ratchet.flows.commands.app import main; main()", "train", str(path)]


@pytest.fixture(scope="module")
def alone(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> History:
    """A run of which no server knows."""
    folder = tmp_path_factory.mktemp("alone")
    config, command = written(workspace, folder, "alone", 4)
    nowhere = os.environ | {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_HOME": str(folder / "client")}
    driver = subprocess.run(command, env=nowhere, capture_output=True, text=True, timeout=900)
    assert driver.returncode == 0, driver.stdout + driver.stderr
    assert (
        "continues without Prefect, which does not record what follows: Failed to reach API at http://127.0.0.1:9/api"
        in driver.stdout
    )
    return History.of(config)


def test_a_run_outlives_a_restart_of_the_server(workspace: Path, tmp_path: Path) -> None:
    config, command = written(workspace, tmp_path, "outlives", 12)
    with prefect_api(tmp_path) as url:
        port = url.split(":")[2].split("/")[0]
        server = next(child for child in psutil.Process().children(recursive=True) if port in child.cmdline())
        environment = os.environ | {"PREFECT_API_URL": url, "PREFECT_HOME": str(tmp_path / "client")}
        driver = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 900
        while not ((tmp_path / "runs/outlives/log").exists() and History.of(config).state.iteration >= 2):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        server.send_signal(signal.SIGKILL)
        time.sleep(3)
        with prefect_api(tmp_path, port=int(port)):
            assert driver.wait(timeout=900) == 0
    history = History.of(config)
    history.check_sound()
    assert (history.state.iteration, history.state.term) == (12, 1), "the same driver went on"


def test_a_server_that_has_no_place_for_a_task_stops_nothing(workspace: Path, tmp_path: Path) -> None:
    """A busy one answers 503 to whoever asks for a place among the tasks of a tag, and stages would wait, or fail."""
    config, command = written(workspace, tmp_path, "busy", 2)
    full = Rule("POST", "concurrency_limits", "503", times=10**9)
    with prefect_api(tmp_path) as url, proxy(int(url.split(":")[2].split("/")[0]), full) as before:
        environment = os.environ | {"PREFECT_API_URL": f"{before}/api", "PREFECT_HOME": str(tmp_path / "client")}
        driver = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert driver.returncode == 0, driver.stdout + driver.stderr
    assert full.struck == 0, "nobody asks"
    history = History.of(config)
    history.check_sound()
    assert (history.state.iteration, history.state.term) == (2, 1)


@pytest.mark.parametrize(
    "rules",
    [
        [Rule(".*", "", action, times=10**9, share=0.12) for action in ANSWERS],
        [Rule(".*", "", "503", times=10**9)],
        [Rule(".*", "", "never", times=10**9)],
        [Rule(".*", "", "garbled", times=10**9)],
        [Rule(".*", "", "429", times=10**9, share=0.7)],  # as Prefect Cloud beyond the rate that it allows
    ],
    ids=["now this, now that", "503", "nothing", "nonsense", "too many requests"],
)
def test_whatever_the_server_answers_the_run_computes_and_commits(
    rules: list[Rule], workspace: Path, tmp_path: Path, alone: History
) -> None:
    config, command = written(workspace, tmp_path, "watched", 4)
    with prefect_api(tmp_path) as url, proxy(int(url.split(":")[2].split("/")[0]), *rules) as before:
        environment = os.environ | {
            "PREFECT_API_URL": f"{before}/api",
            "PREFECT_HOME": str(tmp_path / "client"),
            "PREFECT_API_REQUEST_TIMEOUT": "2",  # where the proxy holds its answer back for longer
        }
        driver = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert driver.returncode == 0, driver.stdout + driver.stderr
    assert sum(rule.struck for rule in rules) > 0
    assert "the run continues without Prefect, which does not record what follows" in driver.stdout
    history = History.of(config)
    history.check_sound()
    assert history.state.iteration == 4
    assert history.results == alone.results


@pytest.mark.parametrize("action", ["503", "dropped before", "garbled"])
def test_a_driver_that_is_stopped_stops_though_prefect_is_not_told(
    action: Action, workspace: Path, tmp_path: Path
) -> None:
    """What a flow ended with is not lost with the request that would have recorded it, and nothing begins again."""
    config, command = written(workspace, tmp_path, "stopped", 200)
    fails = Rule(".*", "", action, times=0)
    with prefect_api(tmp_path) as url, proxy(int(url.split(":")[2].split("/")[0]), fails) as before:
        environment = os.environ | {"PREFECT_API_URL": f"{before}/api", "PREFECT_HOME": str(tmp_path / "client")}
        driver = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        deadline = time.monotonic() + 900
        while not ((tmp_path / "runs/stopped/log").exists() and History.of(config).state.iteration >= 1):
            assert time.monotonic() < deadline
            assert driver.poll() is None
            time.sleep(0.2)
        fails.times = 10**9
        driver.send_signal(signal.SIGTERM)
        said, _ = driver.communicate(timeout=600)
    assert driver.returncode == 1, said
    assert "stopped; `ratchet resume stopped` continues from the last commit" in said
    history = History.of(config)
    history.check_sound(killed=True)
    assert history.state.iteration < 200
    assert history.state.term == 1


def test_fits_need_no_server_either(workspace: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {n}", "response": "abc"[n % 3] * 5}) + "\n" for n in range(40)))
    options = ["--model", workspace / "model", "--data", data, "--output", tmp_path / "fitted", "--steps", 2]
    command = [
        sys.executable,
        "-c",
        "from ratchet.flows.commands.app import main; main()",
        "sft",
        *options,
        "--store",
        tmp_path / "runs",
    ]
    nowhere = os.environ | {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_HOME": str(tmp_path / "client")}
    fit = subprocess.run([*map(str, command)], env=nowhere, capture_output=True, text=True, timeout=900)
    assert fit.returncode == 0, fit.stdout + fit.stderr
    assert "continues without Prefect, which does not record what follows: Failed to reach API" in fit.stdout
    assert (tmp_path / "fitted" / "model.safetensors").exists()
    assert "Traceback" not in fit.stdout + fit.stderr
