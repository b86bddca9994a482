"""Metrics reach each tracker, in one run however often it is resumed; a tracker that fails is one line."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ratchet.flows.tracking import tracking
from ratchet.infra.execution.preflight.packages import check_packages
from ratchet.infra.execution.preflight.wandb_login import has_login
from ratchet.infra.progress import Event, Note, listening
from ratchet.rlhf.errors import UserError
from tests import tiny
from tests.extras import needs

RUN_ID = "0123456789abcdef"
METRIC = "val-core/countdown/reward/mean@1"


def samples(iteration: int) -> pd.DataFrame:
    return pd.DataFrame({"response": [f"hostile \x1b[2J of {iteration}"], "score": [0.5]})


def logged(root: Path, *values: float, first: int = 0, **changes: Any) -> list[str]:
    """Log a value per iteration; returns the messages for the user."""
    events: list[Event] = []
    with listening(events.append), tracking(tiny.config(root, **changes), RUN_ID, samples) as track:
        for iteration, value in enumerate(values, first):
            track(iteration, {METRIC: value})
    return [event.text for event in events if isinstance(event, Note)]


@pytest.mark.promise
def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert logged(tmp_path, 0.25, tracking="tensorboard") == []
    assert logged(tmp_path, 0.5, first=1, tracking="tensorboard") == []
    assert [path.name for path in (tmp_path / "tracking").iterdir()] == ["tiny"]
    assert all(path.is_file() for path in (tmp_path / "tracking" / "tiny").iterdir()), "one folder"
    stored = EventAccumulator(str(tmp_path / "tracking" / "tiny"))
    stored.Reload()
    assert [(event.step, event.value) for event in stored.Scalars(METRIC)] == [(0, 0.25), (1, 0.5)]


def mlflow_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """MLflow with its files in a folder."""
    import mlflow

    monkeypatch.chdir(folder)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{folder}/mlruns")
    return mlflow


def test_mlflow_has_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = mlflow_in(tmp_path, monkeypatch)
    assert logged(tmp_path, 0.25, tracking="mlflow", run__group="sweep") == []
    assert logged(tmp_path, 0.5, first=1, tracking="mlflow", actor__lr=0.1) == []
    [run] = mlflow.search_runs(experiment_names=["ratchet"], output_format="list")
    assert (run.info.run_name, run.data.params["actor.lr"]) == ("tiny", "0.001")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, METRIC.replace("@", "_at_"))
    assert [(entry.step, entry.value) for entry in history] == [(0, 0.25), (1, 0.5)]


@needs("trackio")
def test_trackio_has_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    import trackio

    assert logged(tmp_path, 0.25, tracking="trackio") == []
    assert logged(tmp_path, 0.5, first=1, tracking="trackio") == []
    [run] = trackio.Api().runs("ratchet")
    assert run.name == "tiny-01234567"


SCRIPT = """
from pathlib import Path
from tests.integration.test_tracking import logged
assert logged(Path("."), 0.25, tracking="wandb", run__project="games", run__group="sweep", run__tags="short") == []
"""


def test_wandb_has_one_run(tmp_path: Path) -> None:
    """In a process of its own: wandb's service writes the log as the process ends."""
    environment = os.environ | {
        "WANDB_MODE": "offline",
        "WANDB_X_SERVICE_WAIT": "180",  # its service starts slowly where the machine has other things to do
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    for _ in range(2):
        ended = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True)
        assert ended.returncode == 0, ended.stderr.decode()
        assert ended.stderr == ended.stdout == b"", "wandb is quiet"
    logs = sorted((tmp_path / "tracking" / "tiny").rglob("*.wandb"))
    assert [log.name for log in logs] == [f"run-{RUN_ID}.wandb"] * 2, "both belong to one run"
    for what in (METRIC, "games", "sweep", "short", "micro_batch_tokens"):
        assert what.encode() in logs[0].read_bytes(), what
    [table] = (tmp_path / "tracking" / "tiny").rglob("wandb/latest-run/files/media/table/samples_*.json")
    assert json.loads(table.read_text())["data"] == [[r"hostile \x1b[2J of 0", 0.5]]


def test_a_tracker_that_cannot_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tracking").write_text("a file, where there should be a folder")
    [line] = logged(tmp_path, 0.25, 0.5, tracking="tensorboard")
    assert line.startswith("tracking: tensorboard failed, and the run continues without it: ")
    assert "\n" not in line


def test_a_tracker_that_fails_later_is_one_line_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow_in(tmp_path, monkeypatch)
    config, events = tiny.config(tmp_path, tracking=["mlflow", "tensorboard"]), list[Event]()
    with listening(events.append), tracking(config, RUN_ID, samples) as track:
        track(0, {METRIC: 0.25})
        shutil.rmtree(tmp_path / "mlruns")
        track(1, {METRIC: 0.5})
        track(2, {METRIC: 0.75})
    [line] = [event.text for event in events if isinstance(event, Note)]
    assert line.startswith("tracking: mlflow failed, and the run continues without it: ")
    stored = EventAccumulator(str(tmp_path / "tracking" / "tiny"))
    stored.Reload()
    assert [event.value for event in stored.Scalars(METRIC)] == [0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("missing", "lines"),
    [
        (["trackio"], ['tracking: trackio needs the package trackio: pip install "ratchet-rlhf[trackio]"']),
        (["accelerate"], ['tracking needs the package accelerate: pip install "ratchet-rlhf[tracking]"']),
        (
            ["accelerate", "trackio", "tensorboard"],
            [
                'tracking: tensorboard needs the package tensorboard: pip install "ratchet-rlhf[tracking]"',
                'tracking: trackio needs the package trackio: pip install "ratchet-rlhf[trackio]"',
            ],
        ),
    ],
)
def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, missing: list[str], lines: list[str]
) -> None:
    find, others = importlib.util.find_spec, ("accelerate", "trackio", "tensorboard")
    there = find("json")
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (None if name in missing else there) if name in others else find(name),
    )
    with pytest.raises(UserError) as error:
        check_packages(tiny.config(workspace, tracking=["tensorboard", "trackio"]))
    assert str(error.value).splitlines() == lines


KEY = "k" * 40


def at_home(home: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], environment: dict[str, str]) -> None:
    """Work in a home folder that has nothing but these files, with no settings of wandb but these."""
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(home), **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(home)
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
        (home / name).chmod(0o600)


@pytest.mark.parametrize(
    ("files", "environment", "is_logged_in"),
    [
        ({}, {}, False),
        ({}, {"WANDB_API_KEY": KEY}, True),
        ({}, {"WANDB_MODE": "offline"}, True),
        ({}, {"WANDB_MODE": "online"}, False),
        ({".netrc": f"machine api.wandb.ai login user password {KEY}"}, {}, True),
        (
            {
                ".netrc": f"machine own.com login user password {KEY}",
                ".config/wandb/settings": "[default]\nbase_url = http://own.com",
            },
            {},
            True,
        ),
        ({"wandb/settings": "[default]\nmode = offline"}, {}, True),
        ({"wandb/settings": "no settings", ".netrc": "no netrc"}, {}, False),
    ],
)
def test_wandb_that_is_not_logged_in_is_refused_before_anything_starts(
    workspace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    environment: dict[str, str],
    is_logged_in: bool,
) -> None:
    at_home(tmp_path, monkeypatch, files, environment)
    config = tiny.config(workspace, tracking=["wandb"])
    if is_logged_in:
        check_packages(config)
        return
    with pytest.raises(UserError) as refused:
        check_packages(config)
    fix = "run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"
    assert str(refused.value) == f"tracking: wandb is not logged in: {fix}"


LOGIN = f"login user password {KEY}"


@pytest.mark.parametrize(
    ("files", "environment", "is_logged_in"),
    [
        ({".netrc": f"machine api.forge.coreweave.com {LOGIN}"}, {}, True),
        ({".netrc": f"machine api.wandb.ai {LOGIN}"}, {}, True),
        ({".netrc": f"machine api.wandb.ai {LOGIN}"}, {"WANDB_BASE_URL": "https://api.forge.coreweave.com"}, True),
        ({".netrc": f"machine api.wandb.ai {LOGIN}"}, {"WANDB_BASE_URL": "https://api.wandb.ai"}, True),
        ({".netrc": f"machine api.forge.coreweave.com {LOGIN}"}, {"WANDB_BASE_URL": "https://api.wandb.ai"}, False),
        ({".netrc": f"machine example.com {LOGIN}"}, {}, False),
        ({".netrc": f"machine own.com {LOGIN}"}, {"WANDB_BASE_URL": "https://own.com:8080"}, False),
        ({".netrc": f"machine own.com:8080 {LOGIN}"}, {"WANDB_BASE_URL": "https://own.com:8080"}, True),
        ({".netrc": f"default {LOGIN}"}, {}, True),
        ({".netrc": 'machine api.wandb.ai login user password ""'}, {}, False),
        ({"_netrc": f"machine api.wandb.ai {LOGIN}"}, {}, True),
        ({".netrc": "", "_netrc": f"machine api.wandb.ai {LOGIN}"}, {}, False),
        ({"other": f"machine api.wandb.ai {LOGIN}"}, {"NETRC": "other"}, True),
        ({".netrc": f"machine api.wandb.ai {LOGIN}"}, {"NETRC": "none"}, False),
    ],
)
def test_a_login_is_one_that_wandb_reads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    environment: dict[str, str],
    is_logged_in: bool,
) -> None:
    from wandb.sdk.lib.urls import DEFAULT_BASE_URL
    from wandb.sdk.lib.wbauth import read_netrc_auth

    at_home(tmp_path, monkeypatch, files, environment)
    theirs = read_netrc_auth(host=environment.get("WANDB_BASE_URL", DEFAULT_BASE_URL)) is not None
    assert has_login() == theirs == is_logged_in
