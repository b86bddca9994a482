#!/usr/bin/env bash
# `ratchet demo word_problems`: a pretrained model learns word problems: supervised training on worked answers, then GRPO.
set -euo pipefail
run() { echo; echo "\$ $*"; "$@"; }

[ -d models/smollm2 ] || run ratchet model smollm2 models/smollm2
run python examples/word_problems/problems.py data/word_problems
run ratchet sft --model models/smollm2 --data data/word_problems/sft.jsonl --output models/word_problems-sft \
    --steps 40 --batch-examples 16 --lr 2e-5 --warmup-steps 5
run ratchet train examples/word_problems/grpo.yaml
run python examples/summary.py word_problems
