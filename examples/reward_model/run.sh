#!/usr/bin/env bash
# The whole of RLHF: a supervised model, a reward model from preferences, PPO against it. From the root of a checkout;
# run again, it goes on where it stopped.
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
run() { echo; echo "\$ $*"; "$@"; }

[ -f data/countdown/train.parquet ] || run ratchet data countdown data/countdown
[ -f models/countdown-base/model.safetensors ] || run python examples/countdown_model.py models/countdown-base
# stopped early, so that there is something left to learn
run ratchet sft --model models/countdown-base --data data/countdown/sft.parquet --output models/countdown-early \
    --steps 300 --batch-examples 32 --lr 2e-3 --warmup-steps 50
mkdir -p data/preferences
[ -f data/preferences/samples.parquet ] || run ratchet evaluate models/countdown-early --data data/countdown/train.parquet \
    --n 4 --reward countdown --output data/preferences/samples.parquet
run python examples/reward_model/preferences.py data/preferences/samples.parquet data/countdown/train.parquet data/preferences
run ratchet reward-model --model models/countdown-early --data data/preferences/train.parquet \
    --validation data/preferences/test.parquet --output models/reward --batch-pairs 64 --epochs 2 --lr 1e-3
run ratchet evaluate models/countdown-early --data data/countdown/test.parquet --reward countdown
run ratchet train examples/reward_model/ppo.yaml
run ratchet evaluate rlhf --data data/countdown/test.parquet --reward countdown
