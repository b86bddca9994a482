#!/usr/bin/env bash
# Makes the two environments of the comparison in build/: TRL 1.16.0 for GRPO, and 1.12.0, the last release with a PPO
# trainer. They have the same torch and transformers as this project.
set -euo pipefail
cd "$(dirname "$0")/../.."
for version in 1.16.0 1.12.0; do
    folder=build/trl-$version
    [ -e "$folder/installed" ] && continue
    ${PYTHON:-python3.11} -m venv "$folder"
    "$folder/bin/pip" install --quiet --constraint constraints.txt torch
    "$folder/bin/pip" install --quiet --constraint constraints.txt "trl==$version" safetensors psutil
    touch "$folder/installed"
done
