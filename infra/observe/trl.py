"""Writes what TRL's GRPO and RLOO trainers compute, while they train."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ratchet.infra.observe.rows import ADVANTAGES, GENERATE, SCORE
from ratchet.infra.observe.run import ObservedRun, ObservedStep, start
from ratchet.infra.observe.sources.source import SOURCE
from ratchet.infra.observe.sources.trl import UNSCORED, named
from ratchet.rlhf.errors import RatchetError, in_one_line

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from trl import GRPOTrainer, RLOOTrainer

LOG_PROBS = {
    "sampling_per_token_logps": (GENERATE, "rollout_log_probs"),
    "old_per_token_logps": ("old_log_probs", "old_log_probs"),
    "ref_per_token_logps": ("ref_log_probs", "ref_log_probs"),
}
"""The stages and columns of TRL's log-probs."""


class TRLCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Writes each generation batch of a trainer as an iteration of a run: tokens, rewards by function, advantages,
    log-probs, and the metrics of the updates that learn from it.

    Example::

        trainer = GRPOTrainer(...)
        trainer.add_callback(TRLCallback(trainer, "my-run"))
        trainer.train()

    No error of it reaches the trainer once it trains; notes on standard error say what is not stored.
    """

    def __init__(self, trainer: GRPOTrainer | RLOOTrainer, run: str, store: str = "file://./runs") -> None:
        """Wraps the trainer's generation.

        Args:
            trainer: a `GRPOTrainer` or a `RLOOTrainer`, of TRL 1.x. On several processes, each needs the callback; the
                main process writes.
            run: name of the run.
            store: folder of runs: any fsspec URL.
        """
        self._trainer = trainer
        self._name, self._store = run, store
        self._run: ObservedRun | None = None
        self._step: ObservedStep | None = None
        self._logged: dict[str, list[float]] = {}
        self._held_out: list[dict[str, Any]] = []
        """Answers of the evaluation that is under way."""
        self._validations: list[list[dict[str, Any]]] = []
        generate = trainer._generate_and_score_completions

        def recorded(inputs: list[dict[str, Any]]) -> dict[str, Any]:
            outputs: dict[str, Any] = generate(inputs)
            self._generated(inputs, outputs)
            return outputs

        trainer._generate_and_score_completions = recorded

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Opens the run. Raises UserError and Fenced as `observe.start`."""
        if self._trainer.accelerator.is_main_process:
            per_batch = args.steps_per_generation * getattr(args, "num_iterations", 1)
            self._run = start(
                self._name,
                self._store,
                trainer="trl",
                config=args.to_dict(),
                model=getattr(self._trainer.model.config, "_name_or_path", None) or None,
                iterations=math.ceil(state.max_steps * args.gradient_accumulation_steps / per_batch),
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> None:
        """Collects metrics for the open step; several logs of a step are averaged."""
        for name, value in (logs or {}).items():
            if isinstance(value, int | float) and math.isfinite(value) and not name.startswith("eval_"):
                self._logged.setdefault(name, []).append(float(value))

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Takes the answers of an evaluation as a validation, which is written once the step is closed."""
        if self._held_out:
            self._validations.append(self._held_out)
        self._held_out = []

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Waits until everything is stored."""
        if self._run is not None:
            self._run.attempt(self._close_step)
            self._run.close(finished=state.global_step >= state.max_steps)

    def _generated(self, inputs: Sequence[Mapping[str, Any]], outputs: Mapping[str, Any]) -> None:
        """Takes a generation batch of all processes."""
        from accelerate.utils import gather_object

        try:
            own: list[dict[str, Any] | str] = [
                drawn | {"asked": {name: value for name, value in row.items() if name != "prompt"}}
                for drawn, row in zip(_tokens(outputs), inputs, strict=True)
            ]
        except Exception as error:  # another version of TRL; the other processes wait for this one
            own = [f"{type(error).__name__}: {in_one_line(error)}"]
        gathered = gather_object(own)
        if self._run is not None:
            run = self._run
            run.attempt(lambda: self._take(run, gathered))

    def _take(self, run: ObservedRun, gathered: Sequence[dict[str, Any] | str]) -> None:
        drawn = [row for row in gathered if not isinstance(row, str)]
        if len(drawn) < len(gathered):
            raise RatchetError(
                f"the trainer's outputs are not as expected: {next(row for row in gathered if isinstance(row, str))}"
            )
        rows = self._rows(drawn)
        if self._trainer.model.training:
            self._close_step()
            self._step = run.step(self._trainer.state.global_step + 1)
            for stage in (GENERATE, SCORE, "old_log_probs", "ref_log_probs", ADVANTAGES, SOURCE):
                if any(row[stage] for row in rows):
                    self._step.write(stage, [row[stage] for row in rows])
        else:
            self._held_out += [{**row[GENERATE], **row[SCORE]} for row in rows]

    def _close_step(self) -> None:
        """Gives the open step the metrics that were logged since it began, and hands it over, then the validations."""
        logged, self._logged = self._logged, {}
        if self._step is not None:
            self._step.metrics(named({name: sum(values) / len(values) for name, values in logged.items()}))
            self._step.close()
            self._step = None
        validations, self._validations = self._validations, []
        for rows in validations:
            if self._run is not None:
                self._run.validation(rows)

    def _rows(self, drawn: Sequence[Mapping[str, Any]]) -> list[dict[str, dict[str, Any]]]:
        """Returns the columns of each trajectory by stage, in TRL's order: the samples of a prompt are neighbours."""
        trainer, count = self._trainer, len(drawn)
        logs = trainer._logs
        training = trainer.model.training
        group = trainer.num_generations if training else trainer.num_generations_eval
        first = 0 if training else len(self._held_out)  # an evaluation may have several batches
        prompts, completions, advantages = (
            list(logs[name])[-count:] for name in ("prompt", "completion", "advantages")
        )
        rewards = {name: list(values)[-count:] for name, values in logs["rewards"].items()}
        weights = dict(zip(trainer.reward_func_names, trainer.reward_weights.tolist(), strict=True))
        rows = []
        for number, row in enumerate(drawn):
            other = row["asked"]
            parts = {name: values[number] for name, values in rewards.items() if math.isfinite(values[number])}
            columns: dict[str, dict[str, Any]] = {
                GENERATE: {
                    "prompt_id": str((first + number) // group),
                    "prompt": prompts[number],
                    "response": self._text(completions[number], row["ids"]),
                    "prompt_ids": row["prompt_ids"],
                    "response_ids": row["ids"],
                    "finish_reason": self._ending(row["ids"]),
                    **({} if row["tool_mask"] is None else {"response_mask": row["tool_mask"]}),
                    **({"ground_truth": other["ground_truth"]} if "ground_truth" in other else {}),
                },
                SCORE: {"score": sum(weights[name] * value for name, value in parts.items()), "reward_parts": parts}
                if parts
                else {"reward_error": UNSCORED},
                "old_log_probs": {},
                "ref_log_probs": {},
                ADVANTAGES: {"advantages": advantages[number]},
                SOURCE: {f"source_{name}": value for name, value in other.items() if name != "ground_truth"},
            }
            for name, (stage, column) in LOG_PROBS.items():
                if row["log_probs"].get(name) is not None:
                    columns[stage][column] = row["log_probs"][name]
            rows.append(columns)
        return rows

    def _text(self, completion: object, ids: Sequence[int]) -> str:
        if isinstance(completion, str):
            return completion
        if isinstance(completion, Sequence) and len(completion) == 1 and isinstance(completion[0], Mapping):
            content = completion[0].get("content")
            if isinstance(content, str) and not completion[0].get("tool_calls"):
                return content
        text: str = self._trainer.processing_class.decode(ids, skip_special_tokens=True)
        return text

    def _ending(self, ids: Sequence[int]) -> str:
        end = getattr(self._trainer.processing_class, "eos_token_id", None)
        is_cut = len(ids) >= self._trainer.max_completion_length and (not ids or ids[-1] != end)
        return "length" if is_cut else "stop"


def _tokens(outputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the tokens of this process's trajectories, without padding."""
    prompt_mask, mask = outputs["prompt_mask"].bool(), outputs["completion_mask"].bool()
    tool_mask = outputs.get("tool_mask")
    rows = []
    for number in range(len(mask)):
        kept = mask[number]
        log_probs = {name: outputs[name][number][kept].tolist() for name in LOG_PROBS if name in outputs}
        rows.append(
            {
                "prompt_ids": outputs["prompt_ids"][number][prompt_mask[number]].tolist(),
                "ids": outputs["completion_ids"][number][kept].tolist(),
                "tool_mask": None if tool_mask is None else tool_mask[number][kept].int().tolist(),
                "log_probs": log_probs,
            }
        )
    return rows
