#!/usr/bin/env bash
# `ratchet demo guess`: trains a model that knows the rules to play well.
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
run() { echo; echo "\$ $*"; "$@"; }

run python examples/guess/guess.py data/guess
[ -f models/countdown-base/model.safetensors ] || run python examples/countdown/model.py models/countdown-base
run ratchet sft --model models/countdown-base --data data/guess/sft.jsonl --output models/guess-sft \
    --steps 200 --batch-examples 64 --lr 2e-3 --warmup-steps 20
run ratchet train examples/guess/guess.yaml
run ratchet show guess --where "score = 1" --columns turns,score --limit 3
