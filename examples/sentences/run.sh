#!/usr/bin/env bash
# `ratchet demo`: a pretrained model learns to write short sentences.
set -euo pipefail
run() { echo; echo "\$ $*"; "$@"; }

[ -d models/smollm2 ] || run ratchet model smollm2 models/smollm2
run python examples/sentences/sentences.py data/sentences
run ratchet train examples/sentences/grpo.yaml
run python examples/summary.py sentences
