"""Arguments that a config passes on to other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.infra.execution.preflight.engine_args import check_engine_args, dataclass_fields
from ratchet.rlhf.config.engine_args import VLLM_REFUSED, VLLM_ROUNDS, VLLM_SPEED
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
    assert named <= {*dataclass_fields("vllm", "engine/arg_utils.py", "EngineArgs")}
    assert not VLLM_SPEED & {*VLLM_REFUSED, *VLLM_ROUNDS}
