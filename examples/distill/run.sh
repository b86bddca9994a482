#!/usr/bin/env bash
# `ratchet demo distill`: a smaller model learns from the supervised one that `ratchet demo countdown` begins with.
set -euo pipefail
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
if [ ! -f models/countdown-small/model.safetensors ]; then
    run python examples/countdown/model.py models/countdown-small-base --hidden 96 --layers 2
    run ratchet sft --model models/countdown-small-base --data data/countdown/sft.parquet \
        --output models/countdown-small --steps 300 --batch-examples 32 --lr 2e-3 --warmup-steps 50
fi
run ratchet train examples/distill/distill.yaml
run python examples/summary.py distill
