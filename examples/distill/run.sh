#!/usr/bin/env bash
# `ratchet demo distill`: a smaller model learns from the one that `ratchet demo countdown` has trained.
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
run() { echo; echo "\$ $*"; "$@"; }

if [ ! -d models/countdown-teacher ]; then
    [ -d runs/countdown ] || run bash examples/countdown/run.sh
    run ratchet export countdown models/countdown-teacher
fi
if [ ! -f models/countdown-small/model.safetensors ]; then
    run python examples/countdown/model.py models/countdown-small-base --hidden 96 --layers 2
    run ratchet sft --model models/countdown-small-base --data data/countdown/sft.parquet \
        --output models/countdown-small --steps 300 --batch-examples 32 --lr 2e-3 --warmup-steps 50
fi
run ratchet train examples/distill/distill.yaml
run python examples/summary.py distill
