"""What trainers write while they train: TRL's callback, verl's tracking, and the hooks of prime-rl and verifiers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ratchet.infra.runs.run import Run, open_run
from tests import tiny
from tests.extras import VERL, needs

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.promise


def letters(completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(map("abc".count, text))) for text in completions]


def sometimes(completions: list[str], **columns: Any) -> list[float | None]:
    return [None if number % 2 else 1.0 for number, _ in enumerate(completions)]


class Trained:
    """A trainer of TRL in this process, on the tests' tiny model."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        if not (root / "model").exists():
            tiny.model_folder(root / "model")

    def train(self, steps: int, run: str | None, resume: bool = False, **settings: Any) -> Any:
        import trl
        from datasets import Dataset
        from transformers import AutoTokenizer

        from ratchet.observe import TRLCallback

        rows = [{"prompt": f"say {number}", "ground_truth": str(number), "level": number % 3} for number in range(16)]
        data = Dataset.from_list(rows)
        trainer = getattr(trl, f"{self.name}Trainer")(
            model=str(self.root / "model"),
            reward_funcs=[letters, sometimes],
            args=getattr(trl, f"{self.name}Config")(
                output_dir=str(self.root / "out"),
                max_steps=steps,
                per_device_train_batch_size=8,
                per_device_eval_batch_size=8,
                num_generations=4,
                max_completion_length=8,
                logging_steps=1,
                learning_rate=1e-3,
                reward_weights=[2.0, 0.5],
                report_to=[],
                use_cpu=True,
                bf16=False,
                seed=1,
                **settings,
            ),
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            processing_class=AutoTokenizer.from_pretrained(self.root / "model", padding_side="left"),
        )
        if run is not None:
            trainer.add_callback(TRLCallback(trainer, run, f"file://{self.root}/runs"))
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer

    def stored(self, run: str) -> Run:
        return open_run(f"file://{self.root}/runs/{run}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_trl_writes_tokens_rewards_and_advantages_and_trains_as_without(name: str, tmp_path: Path) -> None:
    trained = Trained(tmp_path, name)
    settings: dict[str, Any] = {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2}
    if name == "GRPO":
        settings |= {"steps_per_generation": 2, "beta": 0.1}
    plain = trained.train(4, None, **settings)
    watched = trained.train(4, "watched", **settings)
    for (key, before), after in zip(plain.model.state_dict().items(), watched.model.state_dict().values(), strict=True):
        assert before.equal(after), key
    run = trained.stored("watched")
    batches = 2 if name == "GRPO" else 4
    frame, metrics = run.trajectories(), run.metrics()
    assert run.state.iteration == run.config.known_iterations == batches
    assert len(frame) == batches * (16 if name == "GRPO" else 8)
    assert metrics["training/global_step"].tolist() == ([1, 3] if name == "GRPO" else [1, 2, 3, 4])
    for row in frame.itertuples():
        parts = {"letters": float(sum(map("abc".count, row.response)))} | ({} if row.sample % 2 else {"sometimes": 1.0})
        assert row.reward_parts == parts
        assert row.score == 2.0 * parts["letters"] + 0.5 * parts.get("sometimes", 0.0)
        assert row.prompt == f"say {row.ground_truth}" and row.source_level == int(row.ground_truth) % 3
        assert len(row.response_ids) == len(row.advantages) == len(row.response_mask) <= 8
        assert len(set(row.advantages)) == 1
        if name == "GRPO":
            assert len(row.old_log_probs) == len(row.ref_log_probs) == len(row.response_ids)
    assert (frame.groupby(["iteration", "prompt_id"])["prompt"].nunique() == 1).all()
    assert (frame.groupby(["iteration", "prompt_id"]).size() == 4).all()
    assert metrics["critic/score/mean"].tolist() == pytest.approx(frame.groupby("iteration")["score"].mean().tolist())
    logged = {entry["step"]: entry for entry in watched.state.log_history if "grad_norm" in entry}
    of_batch = [logged[step]["grad_norm"] for step in ((1, 2) if name == "GRPO" else (1,))]
    assert metrics["actor/grad_norm"][0] == pytest.approx(np.mean(of_batch))
    held_out = run.validation()
    assert held_out.groupby("iteration").size().to_dict() == ({1: 16, 2: 16} if name == "GRPO" else {2: 16, 4: 16})
    assert (held_out.groupby(["iteration", "prompt_id"])["prompt"].agg(["nunique", "size"]) == [1, 4]).all(axis=None)


@pytest.mark.slow
def test_a_resumed_trainer_of_trl_repeats_steps_in_a_fork(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "GRPO")
    settings: dict[str, Any] = {"save_steps": 2}
    trained.train(3, "watched", **settings)
    (tmp_path / "out" / "checkpoint-3").rename(tmp_path / "lost")
    trained.train(4, "watched", resume=True, **settings)
    first, second = trained.stored("watched"), trained.stored("watched-2")
    assert first.metrics()["training/global_step"].tolist() == [1, 2, 3]
    assert second.metrics()["training/global_step"].tolist() == [1, 2, 3, 4]
    same = ["trajectory_id", "response", "score"]
    assert first.trajectories(1)[same].equals(second.trajectories(1)[same])
    assert not (tmp_path / "runs" / "watched-2" / "trajectories" / "generate" / "iteration=000001").exists()


def test_a_store_that_refuses_is_said_before_the_first_step(tmp_path: Path) -> None:
    from ratchet import observe
    from ratchet.rlhf.errors import UserError

    observe.start("mine", f"file://{tmp_path}/runs", trainer="mine").close()
    with pytest.raises(UserError, match="is mine's run, and trl would write to it: choose another name"):
        Trained(tmp_path, "GRPO").train(2, "mine")


VERL_PROGRAM = """
import json, sys
from pathlib import Path
import ratchet.infra.observe.verl_plugin
assert "ratchet.infra.observe.run" not in sys.modules
from verl.utils.tracking import Tracking
root = Path(sys.argv[1])
trainer = {"rollout_data_dir": str(root / "rollouts"), "validation_data_dir": str(root / "held_out")}
tracking = Tracking("project", "seen", ["console", "ratchet"], config={"trainer": trainer, "wandb_api_key": "secret"})
def dump(folder, step, **more):
    (root / folder).mkdir(exist_ok=True)
    rows = [
        {"input": f"q{i // 2}", "output": f"a{i}", "gts": "1", "score": i % 2, "step": step} for i in range(4)
    ]
    rows = [{**row, "uid": f"u-{i // 2}_{i % 2}_0", **more} for i, row in enumerate(rows)]
    (root / folder / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
dump("held_out", 0, acc=True)
tracking.log({"val-core/x/reward/mean@1": 0.5}, 0)
for step in (1, 2, 3):
    dump("rollouts", step)
    tracking.log({"actor/pg_loss": 0.25 * step, "training/global_step": step}, step)
tracking.finish()
"""


@needs("verl")
def test_verls_tracking_writes_metrics_and_what_verl_dumps(tmp_path: Path) -> None:
    environment = {
        "PYTHONPATH": f"{ROOT}/src:{ROOT}",
        "RATCHET_STORE": f"file://{tmp_path}/runs",
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        [VERL, "-c", VERL_PROGRAM, tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    run = open_run(f"file://{tmp_path}/runs/seen")
    metrics, frame = run.metrics(), run.trajectories()
    assert metrics["actor/pg_loss"].tolist() == [0.25, 0.5, 0.75]
    assert metrics["training/global_step"].tolist() == [1, 2, 3]
    assert frame.groupby("iteration")["score"].sum().tolist() == [2, 2, 2]
    assert frame["prompt_id"].nunique() == 6
    assert run.validation()["reward_parts"].tolist() == [{"acc": 1.0}] * 4
    assert "secret" not in json.dumps(run.config.model_dump(mode="json"))


def episode(number: int, score: float) -> Any:
    from verifiers.v1 import Episode

    nodes: list[Mapping[str, Any]] = [
        {"message": {"role": "user", "content": f"what is {number // 2}?"}, "sampled": False, "timestamp": 1.0},
        {
            "parent": 0,
            "message": {"role": "assistant", "content": str(number)},
            "sampled": True,
            "timestamp": 2.0,
            "token_ids": [5, number],
            "mask": [True, True],
            "is_content": [True, True],
            "logprobs": [-0.5, -0.25],
        },
    ]
    task = {"type": "Task", "data": {"idx": number // 2, "prompt": f"what is {number // 2}?"}}
    trace = {"task": task, "nodes": nodes, "rewards": {"right": {"score": score, "weight": 1.0}}, "is_completed": True}
    return Episode.model_validate(
        {
            "id": f"{number:032x}",
            "env": {"id": "counting"},
            "task": task,
            "group": {"id": f"group-{number // 2}"},
            "traces": [{**trace, "agent": {"config": {}, "name": "agent"}}],
        }
    )


@needs("verifiers")
def test_prime_rls_monitor_writes_steps_and_evaluations(tmp_path: Path) -> None:
    from ratchet.observe import PrimeRLMonitor

    async def trained() -> None:
        monitor = PrimeRLMonitor("seen", f"file://{tmp_path}/runs")
        await monitor.log([episode(9, 1.0)], 1, "eval")
        for step in (1, 2):
            every = [episode(10 * step + number, float(number % 2)) for number in range(4)]
            await monitor.log(every, step, "train", "all")
            await monitor.log(every[:2], step, "train", "effective")
            await monitor.log({"optim/lr": 0.5 * step, "custom": 1.0}, step)
        await monitor.finalize()

    asyncio.run(trained())
    run = open_run(f"file://{tmp_path}/runs/seen")
    frame, metrics = run.trajectories(), run.metrics()
    assert frame["response"].tolist() == ["10", "11", "20", "21"] and frame["score"].tolist() == [0, 1, 0, 1]
    assert [ids.tolist() for ids in frame["response_ids"]] == [[5, 10], [5, 11], [5, 20], [5, 21]]
    assert frame["rollout_log_probs"][0].tolist() == [-0.5, -0.25]
    assert frame["prompt_id"].nunique() == 2
    assert metrics["actor/lr"].tolist() == [0.5, 1.0] and metrics["prime-rl/custom"].tolist() == [1.0, 1.0]
    assert run.validation()[["iteration", "response", "score"]].to_numpy().tolist() == [[0, "9", 1.0]]


@needs("verifiers")
def test_a_hook_of_verifiers_writes_an_evaluation(tmp_path: Path) -> None:
    from ratchet.observe import VerifiersHook

    async def evaluated() -> None:
        with VerifiersHook("seen", f"file://{tmp_path}/runs") as hook:
            for number in range(3):
                await hook(episode(number, 1.0))

    asyncio.run(evaluated())
    run = open_run(f"file://{tmp_path}/runs/seen")
    assert run.trajectories()["response"].tolist() == ["0", "1", "2"]
    assert run.state.iteration == run.config.known_iterations == 1


def test_hooks_are_imported_when_they_are_used() -> None:
    program = (
        "import sys; from ratchet import observe; print({'torch', 'transformers', 'verifiers'} & sys.modules.keys())"
    )
    told = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "set()"
