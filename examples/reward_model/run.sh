#!/usr/bin/env bash
# `ratchet demo reward_model`: all of RLHF: a supervised model, a reward model from preferences, PPO against it.
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
run() { echo; echo "\$ $*"; "$@"; }

[ -f data/countdown/train.parquet ] || run ratchet data countdown data/countdown
[ -f models/countdown-base/model.safetensors ] || run python examples/countdown/model.py models/countdown-base
# few steps, so that PPO has something left to learn
run ratchet sft --model models/countdown-base --data data/countdown/sft.parquet --output models/countdown-early \
    --steps 300 --batch-examples 32 --lr 2e-3 --warmup-steps 50
run python examples/reward_model/preferences.py data/countdown/sft.parquet data/preferences
run ratchet reward-model --model models/countdown-early --data data/preferences/train.parquet \
    --validation data/preferences/test.parquet --output models/reward --batch-pairs 64 --lr 5e-4
run ratchet train examples/reward_model/ppo.yaml
# the result: the share of answers that begin with their largest number, and then the share of right answers
run ratchet query rlhf "with answers as (select iteration, model_score, regexp_extract_all(response, '\d+')::int[] as numbers
    from trajectories) select iteration, avg(model_score) as model_score,
    avg((numbers[1] = list_max(numbers))::int) as preferred from answers where iteration % 5 in (0, 4) group by 1 order by 1"
run ratchet evaluate models/countdown-early --data data/countdown/test.parquet --reward countdown
run ratchet evaluate rlhf --data data/countdown/test.parquet --reward countdown
