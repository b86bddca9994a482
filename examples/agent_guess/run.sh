#!/usr/bin/env bash
# `ratchet demo agent_guess`: trains an agent to play well (pip install openai).
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
run() { echo; echo "\$ $*"; "$@"; }

run python examples/guess/guess.py data/guess
[ -f models/countdown-base/model.safetensors ] || run python examples/countdown/model.py models/countdown-base
[ -f models/guess-sft/model.safetensors ] || run ratchet sft --model models/countdown-base \
    --data data/guess/sft.jsonl --output models/guess-sft --steps 200 --batch-examples 64 --lr 2e-3 --warmup-steps 20
run ratchet train examples/agent_guess/guess.yaml
run ratchet show guess-agent --where "score = 1" --columns turns,calls,score --limit 3
