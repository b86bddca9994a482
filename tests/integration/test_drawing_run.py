"""A run that draws its prompts from a mixture, by their solve rates, in epochs."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import yaml

from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.data.prompts import PromptDataset
from tests import tiny
from tests.history import History
from tests.processes import Child, Fault, Processes


def test_what_was_drawn_is_a_function_of_what_is_committed(workspace: Path, processes: Processes) -> None:
    """While iteration k trains, iteration k + 1 draws by the scores of iterations up to k - 1: after a crash, and in a
    replay, too."""

    def start(name: str, *faults: Fault) -> tuple[RunConfig, Child]:
        config = tiny.config(
            workspace,
            run__name=name,
            run__store=f"file://{processes.folder}/runs",
            data__train=[str(workspace / file) for file in ("prompts.parquet", "held_out.parquet")],
            data__weights=[3, 1],
            data__curriculum={"weight": 0.1, "lag": 2, "solved_score": 1.0},
            rollout__mode="one_step_off",
            reward__function="tests.rewards:mostly_flat",
            train={"epochs": 1.5},
        )
        path = processes.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        return config, processes.cli("train", path, faults=faults)

    config, child = start("quiet")
    assert child.wait() == 0, child.text
    assert "train.epochs 1.5 of 19 prompts: 8 iterations of 4 prompts" in child.text
    expected = History.of(config)
    assert expected.state.iteration == 8
    frame = expected.run.trajectories(columns=["prompt_id", "dataset_row", "score", "prompt"])
    dataset = PromptDataset(config.data.train)
    weights, replaced = config.data.weights, 0
    for k in range(8):
        rates: dict[Any, float] = {}
        for earlier in range(k - 1):
            of_row = frame[frame["iteration"] == earlier].groupby("dataset_row")["score"]
            rates |= of_row.mean().to_dict()  # scores are 0 or 1
        chances = {row: 0.1 for row, rate in rates.items() if rate in (0.0, 1.0)}
        wanted = dataset.draw(config.run.seed, 4 * k, 4, weights, lambda row, now=chances: now.get(row, 1.0))
        drawn = frame[frame["iteration"] == k].drop_duplicates("prompt_id")["dataset_row"].tolist()
        assert drawn == wanted, f"iteration {k}"
        replaced += sum(map(int.__ne__, drawn, dataset.draw(config.run.seed, 4 * k, 4, weights)))
    assert replaced > 3, "the curriculum had an effect"

    fault = Fault("put", "trajectories/generate/iteration=000005/.*part-00001", "before")
    config, killed = start("crash", fault)
    assert killed.wait() == -signal.SIGKILL, killed.text
    settings = yaml.safe_load((processes.folder / "crash.yaml").read_text())
    settings["data"]["curriculum"]["weight"] = 0.5
    (processes.folder / "changed.yaml").write_text(yaml.safe_dump(settings))
    refused = processes.cli("train", processes.folder / "changed.yaml")
    assert refused.wait() == 2, refused.text
    assert "data.curriculum.weight: 0.1 -> 0.5" in refused.text
    resumed = processes.cli("resume", "crash", "--store", config.run.store)
    assert resumed.wait() == 0, resumed.text
    assert History.of(config).results == expected.results
    replayed = processes.cli("reproduce", "quiet", "--iteration", 6, "--store", config.run.store)
    assert replayed.wait() == 0, replayed.text
