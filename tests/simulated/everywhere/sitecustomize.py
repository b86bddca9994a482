"""Gives the simulated GPU to each Python process that starts with this folder in its path, apart from vLLM's, which only
knows the CPU."""

import sys

if "ratchet.rlhf.rollout.vllm_process" not in sys.orig_argv:
    from tests.simulated import device

    device.enable()
