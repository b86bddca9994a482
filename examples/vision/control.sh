#!/usr/bin/env bash
# A control of `ratchet demo vision`: the same training, half as long, with pictures that are exchanged between the rows.
# Nothing can be learned about pictures, so that held-out answers stay at chance, one in six.
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
run() { echo; echo "\$ $*"; "$@"; }

run python examples/vision/pictures.py data/vision-exchanged --shuffled
if [ ! -f models/vision-exchanged-sft/model.safetensors ]; then
    run python examples/vision/model.py models/vision-base
    run ratchet sft --model models/vision-base --data data/vision-exchanged/sft.parquet \
        --output models/vision-exchanged-sft --steps 260 --batch-examples 64 --lr 1.5e-3 --warmup-steps 20 \
        model.freeze_vision=false
fi
run ratchet train examples/vision/grpo.yaml run.name=vision-exchanged model.path=models/vision-exchanged-sft \
    "data.train=[data/vision-exchanged/train.parquet]" validation.data=data/vision-exchanged/test.parquet train.iterations=30
