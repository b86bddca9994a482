#!/usr/bin/env bash
# `ratchet demo vision`: a tiny vision-language model of our own learns to read pictures.
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
run() { echo; echo "\$ $*"; "$@"; }

run python examples/vision/pictures.py data/vision
if [ ! -f models/vision-sft/model.safetensors ]; then
    run python examples/vision/model.py models/vision-base
    run ratchet sft --model models/vision-base --data data/vision/sft.parquet --output models/vision-sft \
        --steps 260 --batch-examples 64 --lr 1.5e-3 --warmup-steps 20 model.freeze_vision=false
fi
run ratchet train examples/vision/grpo.yaml
run python examples/summary.py vision
