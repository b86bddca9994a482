#!/usr/bin/env bash
# `ratchet demo countdown`: a tiny model of our own learns with PPO, in commands that you could type yourself.
set -euo pipefail
# one thread: the same seed gives the same numbers on the same kind of CPU (results depend on threads and on kernels)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
run() { echo; echo "\$ $*"; "$@"; }

if [ ! -f data/countdown/train.parquet ]; then
    run ratchet data countdown data/countdown
fi
if [ ! -f models/countdown-sft/model.safetensors ]; then
    run python examples/countdown/model.py models/countdown-base
    run ratchet sft --model models/countdown-base --data data/countdown/sft.parquet --output models/countdown-sft \
        --steps 900 --batch-examples 32 --lr 2e-3 --warmup-steps 50
fi
run ratchet train examples/countdown.yaml
run python examples/summary.py countdown
