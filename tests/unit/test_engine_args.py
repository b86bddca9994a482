"""Arguments that a config passes on to other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.infra.execution.preflight.engine_args import check_engine_args, fields
from ratchet.rlhf.config.engine_args import DEEPSPEED_REFUSED, DEEPSPEED_SPEED, VLLM_REFUSED, VLLM_ROUNDS, VLLM_SPEED
from ratchet.rlhf.errors import UserError
from tests import tiny
from tests.extras import needs


@needs("vllm")
def test_a_misspelt_argument_of_vllm_is_refused_before_it_starts(tmp_path: Path) -> None:
    args = {"max_num_seq": 8, "speculative_conf": {}, "max_num_batched_tokens": 64}
    with pytest.raises(UserError) as error:
        check_engine_args(tiny.config(tmp_path, rollout__engine={"type": "vllm", "args": args}))
    assert str(error.value).splitlines() == [
        "rollout.engine.args.max_num_seq is no argument of vLLM: write max_num_seqs",
        "rollout.engine.args.speculative_conf is no argument of vLLM: write speculative_config",
    ]


@needs("vllm")
def test_vllm_has_the_arguments_that_are_named() -> None:
    named = {*VLLM_REFUSED, *VLLM_SPEED, *VLLM_ROUNDS}
    assert named <= {*fields("vllm", "engine/arg_utils.py", "EngineArgs")}
    assert not VLLM_SPEED & {*VLLM_REFUSED, *VLLM_ROUNDS}


def test_a_misspelt_key_of_deepspeeds_zero_is_refused(tmp_path: Path) -> None:
    args = {"zero_optimization": {"stage3_prefetch_bucket_size": 1000, "overlap_com": False}}
    config = tiny.config(tmp_path, actor__engine={"type": "deepspeed", "args": args})
    with pytest.raises(UserError, match=r"^actor\.engine\.args\.zero_.*overlap_com .*: write overlap_comm$"):
        check_engine_args(config)


def test_deepspeed_has_the_keys_that_are_named() -> None:
    prefix = "zero_optimization."
    zero = {name.removeprefix(prefix) for name in {*DEEPSPEED_REFUSED, *DEEPSPEED_SPEED} if name.startswith(prefix)}
    assert zero <= {*fields("deepspeed", "runtime/zero/config.py", "DeepSpeedZeroConfig")}
