"""`docs/configuration.md`, generated from the config's models: `python -m flows.reference [--check]`."""

import sys
from pathlib import Path

from rlhf.config import keys

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

Generated from the models in `rlhf/config.py` by `make docs`; `ratchet train --help` prints the same keys. A key is set in
the YAML file (as nested sections) or on the command line (`a.b=c`). Unknown keys are refused. Where an algorithm is
chosen by its `type`, the keys of each choice follow in brackets.

"""

VERL = """
## Coming from verl

| verl | here | note |
|---|---|---|
| `data.train_files` | `data.train` | the same Parquet rows |
| `data.train_batch_size` | `data.prompts_per_iteration` | prompts, not trajectories |
| `data.max_prompt_length`, `data.max_response_length` | `data.max_prompt_tokens`, `rollout.max_response_tokens` | |
| `data.truncation` | `data.truncation` | |
| `actor_rollout_ref.model.path` | `model.path` | critic and reference default to it |
| `actor_rollout_ref.rollout.n` | `rollout.n` | |
| `actor_rollout_ref.actor.ppo_mini_batch_size` | `actor.mini_batch_trajectories` | trajectories of the whole run: verl counts prompts, and multiplies by n |
| `actor_rollout_ref.actor.ppo_max_token_len_per_gpu` | `actor.micro_batch_tokens` | changes memory and speed, never the result |
| `actor_rollout_ref.actor.ppo_epochs` | `actor.ppo_epochs` | |
| `actor_rollout_ref.actor.optim.lr` | `actor.lr` | |
| `actor_rollout_ref.actor.clip_ratio_low`, `_high`, `_c` | `algorithm.loss.clip_ratio_low`, `_high`, `_c` | |
| `actor_rollout_ref.actor.loss_agg_mode` | `algorithm.loss.aggregate` | |
| `actor_rollout_ref.actor.entropy_coeff` | `algorithm.entropy_coef` | |
| `actor_rollout_ref.actor.use_kl_loss`, `kl_loss_coef` | `algorithm.kl.in_loss` | null: no KL loss |
| `algorithm.use_kl_in_reward`, `algorithm.kl_ctrl.kl_coef` | `algorithm.kl.in_reward` | null: no KL in the reward |
| `algorithm.kl_penalty`, `actor.kl_loss_type` | `algorithm.kl.estimator` | `low_var_kl` is `k3`, `kl` is `k1`, `mse` is `k2` |
| `algorithm.adv_estimator` | `algorithm.advantage.type` | `gae`, `grpo` |
| `algorithm.gamma`, `algorithm.lam` | `algorithm.advantage.gamma`, `.lam` | |
| `critic.cliprange_value` | `critic.cliprange_value` | |
| `trainer.critic_warmup` | `critic.warmup_iterations` | |
| `trainer.save_freq` | `checkpoint.every` | what lies in between is replayed, not lost |
| `trainer.total_training_steps` | `train.iterations` | |
| `trainer.logger` | `tracking` | |
| `trainer.test_freq` | `validation.every` | |
"""


def text() -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, kind, default, meaning in keys():
        lines.append(f"| `{key}` | {kind} | `{default}` | {meaning} |")
    return HEAD + "\n".join(lines) + "\n" + VERL


def main() -> None:
    if "--check" not in sys.argv:
        TARGET.write_text(text())
    elif not TARGET.exists() or TARGET.read_text() != text():
        sys.exit("docs/configuration.md is out of date: run `make docs`")


if __name__ == "__main__":
    main()
