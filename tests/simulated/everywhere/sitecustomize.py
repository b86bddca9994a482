"""Gives the simulated GPU to each Python process that starts with this folder in its path, except vLLM's, which
knows the CPU only."""

import sys

if "ratchet.rlhf.rollout.vllm_process" not in sys.orig_argv:
    from tests.simulated import device

    device.enable()
