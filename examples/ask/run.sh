#!/usr/bin/env bash
# `ratchet demo ask`: trains a model that asks, but rarely listens, to do both.
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
run() { echo; echo "\$ $*"; "$@"; }

run python examples/ask/ask.py data/ask
[ -f models/countdown-base/model.safetensors ] || run python examples/countdown/model.py models/countdown-base
run ratchet sft --model models/countdown-base --data data/ask/sft.jsonl --output models/ask-sft \
    --steps 150 --batch-examples 64 --lr 2e-3 --warmup-steps 20
run ratchet train examples/ask/ask.yaml
run ratchet show ask --where "score = 1" --columns turns,score --limit 3
