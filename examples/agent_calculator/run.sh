#!/usr/bin/env bash
# `ratchet demo agent_calculator`: trains an agent to call its tool (pip install openai).
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
run() { echo; echo "\$ $*"; "$@"; }

run python examples/agent_calculator/agent.py data/calculator
[ -f models/countdown-base/model.safetensors ] || run python examples/countdown/model.py models/countdown-base
[ -f models/calculator-sft/model.safetensors ] || run ratchet sft --model models/countdown-base \
    --data data/calculator/sft.jsonl --output models/calculator-sft --steps 400 --batch-examples 64 --lr 2e-3 \
    --warmup-steps 20
run ratchet train examples/agent_calculator/calculator.yaml
run ratchet show calculator-agent --where "score = 1" --columns calls,score --limit 3
