"""The config: what is refused and how it is said, overrides, and what a stage may see of it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from pydantic import ValidationError

from ratchet.rlhf.algorithms import GRPO
from ratchet.rlhf.config import RunConfig, incompatibilities, keys, load_config, parse_config, stored_config, yaml_text
from ratchet.rlhf.errors import UserError

if TYPE_CHECKING:
    from _typeshed import TraceFunction

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("**/*.yaml"))

MINIMAL: dict[str, Any] = {"model": {"path": "somewhere"}, "data": {"train": ["prompts.parquet"]}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def test_the_minimal_config_is_the_documented_default(file: Path) -> None:
    config = load_config(file)
    assert config.trajectories_per_iteration == 256
    assert (config.needs_critic, config.needs_reference, config.needs_old_log_probs) == (True, False, True)
    assert config == parse_config(MINIMAL, "here")


WRONG = [
    # unknown keys
    ("foo=1", "foo is not a key of the config"),
    ("actor.mini_batch=1", "actor.mini_batch is not a key of the config"),
    ("algorithm.advantage={type: grpo, gamma: 1}", "algorithm.advantage.gamma is no option of grpo, but of gae"),
    ("critic.model={path: x, pth: y}", "critic.model.pth is not a key of the config"),
    # missing ones
    ("model={}", "model.path is missing: set it"),
    ("model=null", "model.path is missing: set it"),
    ("reward={function: judge, judge: {model: m}}", "reward.judge.url is missing: set it"),
    ("algorithm.advantage=gea", "algorithm.advantage.type is 'gea': input should be one of 'gae', 'grpo'"),
    ("algorithm.advantage=gdpo", "algorithm.advantage.parts is missing: set it"),
    ("algorithm.advantage.lamda=0.9", "algorithm.advantage.lamda is not a key of the config (is it algorithm.advantage.lam"),  # noqa: E501
    ("algorithm.kl=0.1", "algorithm.kl is 0.1: it should be a section, such as {key: value}"),
    ("algorithm.advantage={type: gdpo, parts: score}", "algorithm.advantage.parts is 'score': it should be a list, such as [a, b]"),  # noqa: E501
    ("algorithm.advantage={type: gdpo, parts: [a]}; algorithm.overlong_penalty.buffer_tokens=9", "algorithm.overlong_penalty would do nothing"),  # noqa: E501
    ("algorithm.kl={in_reward: 0, controller: {type: adaptive, target: 1}}", "algorithm.kl.in_reward, the coefficient that it adapts, is 0"),  # noqa: E501
    ("algorithm.advantage={type: gdpo, parts: [a], weights: [1, 2]}", "algorithm.advantage: weights has 2 values for 1 parts: give one each"),  # noqa: E501
    ("algorithm.kl.controller.type=adaptive", "algorithm.kl.controller.target is missing: set it"),
    # wrong types and values
    ("rollout.n=many", "rollout.n is 'many': input should be a valid integer"),
    ("rollout.n=1.5", "rollout.n is 1.5: input should be a valid integer"),
    ("rollout.n=0", "rollout.n is 0: input should be greater than 0"),
    ("rollout.top_p=1.1", "rollout.top_p is 1.1: input should be less than or equal to 1"),
    ("actor.lr=.nan", "actor.lr is nan: input should be a finite number"),
    ("actor.lr=-1e-5", "actor.lr is -1e-05: input should be greater than 0"),
    ("actor.optimizer.betas=[0.9, 1.0]", "actor.optimizer.betas.1 is 1.0: input should be less than 1"),
    ("data.train=[]", "data.train is []"),
    (
        "data.truncation=centre",
        "data.truncation is 'centre': input should be 'error', 'left', 'right', 'middle' or 'drop'",
    ),
    ("run.name=a/b", "run.name is 'a/b': string should match pattern"),
    ("algorithm.advantage.type=gea", "algorithm.advantage.type is 'gea': input should be one of 'gae', 'grpo'"),
    ("algorithm.loss.clip_ratio_c=1", "algorithm.loss.clip_ratio_c is 1: input should be greater than 1"),
    ("actor.lr.peak=1", "actor.lr"),
    # impossible combinations
    ("actor.mini_batch_trajectories=257", "actor.mini_batch_trajectories is 257, more than an iteration has (data.prompts_per_iteration 64 x rollout.n 4 = 256): lower it"),  # noqa: E501
    ("critic.mini_batch_trajectories=100", "critic.mini_batch_trajectories is 100, which does not divide 256"),
    ("actor.micro_batch_tokens=1023", "actor.micro_batch_tokens is 1023, less than one trajectory may have (data.max_prompt_tokens + rollout.max_response_tokens = 1024): raise it"),  # noqa: E501
    ("critic.engine.sequence_parallel=2", "critic.engine.sequence_parallel is 2, which does not divide the number of processes that hold the critic (1): change one of them"),  # noqa: E501
    ("pools={all: {workers: 3}}; actor.engine.sequence_parallel=2", "actor.engine.sequence_parallel is 2, which does not divide the number of processes that hold the actor (3)"),  # noqa: E501
    ("actor.engine=fsdp; actor.offload_when_idle=true; actor.engine.offload=true", "actor.engine.offload already keeps the state in host memory, so actor.offload_when_idle does nothing: set only one of them"),  # noqa: E501
    ("critic.engine=deepspeed; critic.engine.zero_stage=3; critic.offload_when_idle=true", "critic.offload_when_idle does not work with critic.engine.zero_stage 3"),  # noqa: E501
    ("pools={all: {workers: 2}}; actor.engine.tensor_parallel=2", "actor.engine.tensor_parallel is no option of torch, but of fsdp and megatron"),  # noqa: E501
    ("pools={all: {workers: 2}}; model.lora={}; actor={engine: {type: fsdp, tensor_parallel: 2}}", "actor.engine.tensor_parallel does not work with model.lora: remove one of them"),  # noqa: E501
    ("actor.engine.pipeline_parallel=2", "actor.engine.pipeline_parallel is no option of torch, but of megatron: remove it, or set actor.engine.type to megatron"),  # noqa: E501
    ("actor.engine.distributed_optimizer=false", "actor.engine.distributed_optimizer is no option of torch, but of megatron: remove it, or set actor.engine.type to megatron"),  # noqa: E501
    ("pools={all: {workers: 6}}; actor={engine: {type: megatron, tensor_parallel: 2, pipeline_parallel: 2}}", "actor.engine.tensor_parallel x pipeline_parallel is 4, which does not divide the number of processes that hold the actor (6)"),  # noqa: E501
    ("pools={all: {workers: 2}}; actor={engine: {type: megatron, expert_parallel: 2, pipeline_parallel: 2}}", "actor.engine.expert_parallel x pipeline_parallel is 4, which does not divide the number of processes that hold the actor (2)"),  # noqa: E501
    ("pools={all: {workers: 2}}; actor={engine: {type: megatron, context_parallel: 4}}", "actor.engine.context_parallel is 4, which does not divide the number of processes that hold the actor (2)"),  # noqa: E501
    ("actor={engine: {type: fsdp, context_parallel: 2}}", "actor.engine.context_parallel is no option of fsdp, but of megatron: remove it, or set actor.engine.type to megatron"),  # noqa: E501
    ("actor={engine: {type: fsdp, expert_parallel: 2}}", "actor.engine.expert_parallel is no option of fsdp, but of megatron: remove it, or set actor.engine.type to megatron"),  # noqa: E501
    ("model.lora={}; actor.engine=megatron", "model.lora is not supported yet by engine megatron: remove it, or set actor.engine to fsdp"),  # noqa: E501
    ("critic={engine: megatron, model: {path: judge, kernels: compile}}", "critic.model.kernels compile is not supported yet by engine megatron: remove it, or set critic.engine to fsdp"),  # noqa: E501
    ("model.kernels=compile; actor.engine=megatron", "model.kernels compile is not supported yet by engine megatron"),
    ("actor={engine: megatron, packing: true}", "actor.packing true is not supported yet by engine megatron"),
    ("actor={engine: {type: megatron, offload: true}}", "actor.engine.offload is no option of megatron, but of fsdp and deepspeed: remove it"),  # noqa: E501
    ("pools={all: {workers: 2}}; critic={engine: {type: megatron, sequence_parallel: 2}}", "critic.engine.sequence_parallel is no option of megatron, but of torch, fsdp and deepspeed: remove it"),  # noqa: E501
    ("pools={a: {workers: 2}, b: {}}; placement={actor: a, critic: a, rollout: a, reference: b}; actor.engine.sequence_parallel=2; algorithm.kl.in_reward=0.1", "actor.engine.sequence_parallel is 2, which does not divide the number of processes that hold the reference (1)"),  # noqa: E501
    ("pools={all: {workers: 2}}; actor.engine.shard_size=2", "actor.engine.shard_size is no option of torch, but of fsdp: remove it, or set actor.engine.type to fsdp"),  # noqa: E501
    ("model.kernels=compile; actor.engine=deepspeed", "model.kernels compile does not work with actor.engine deepspeed: set model.kernels to torch"),  # noqa: E501
    ("critic.model={path: m, kernels: compile}; critic.engine=deepspeed", "critic.model.kernels compile does not work with critic.engine deepspeed: set critic.model.kernels to torch"),  # noqa: E501
    ("rollout.engine.tensor_parallel=2", "rollout.engine.tensor_parallel is no option of hf, but of vllm: remove it, or set rollout.engine.type to vllm"),  # noqa: E501
    ("actor.gradient_checkpointing=full", "actor.gradient_checkpointing: should be true, false, selective or null"),
    ("actor.engine.reshard_after_forward=false", "actor.engine.reshard_after_forward is no option of torch, but of fsdp: remove it, or set actor.engine.type to fsdp"),  # noqa: E501
    ("pools={all: {workers: 8}}; actor={engine: {type: fsdp, shard_size: 3}}", "actor.engine.shard_size is 3, which does not divide the number of processes that hold the actor (8): change one of them"),  # noqa: E501
    ("pools={all: {workers: 8}}; actor={engine: {type: fsdp, shard_size: 2, tensor_parallel: 4}}", "actor.engine: shard_size is 2, which is no multiple of tensor_parallel 4: raise it"),  # noqa: E501
    ("model.attention=flash_attention_2; model.dtype=float32", "model.attention flash_attention_2 computes in 16 bits: set model.dtype bfloat16, or use sdpa"),  # noqa: E501
    ("rollout.engine.quantization=fp8", "rollout.engine.quantization is no option of hf, but of vllm: remove it, or set rollout.engine.type to vllm"),  # noqa: E501
    ("rollout.engine={type: vllm, args: {dtype: half, logits_processors: [mine]}}", "rollout.engine: args.dtype cannot be set: set model.dtype; args.logits_processors cannot be set: the trainer could not compute the probabilities of tokens that are drawn with it"),  # noqa: E501
    ("rollout.engine={type: vllm, args: {tensor_parallel_size: 2}}", "rollout.engine: args.tensor_parallel_size cannot be set: set rollout.engine.tensor_parallel"),  # noqa: E501
    ("rollout.engine={type: vllm, args: {speculative_config: {method: ngram, rejection_sample_method: synthetic}}}", "rollout.engine: args.speculative_config.rejection_sample_method is synthetic, which draws tokens with other probabilities than the model's: remove it"),  # noqa: E501
    ("rollout.engine={type: vllm, args: {seen: 2026-01-01}}", "rollout.engine.args.seen is datetime.date(2026, 1, 1): input was not a valid JSON value"),  # noqa: E501
    ("actor.engine={type: fsdp, args: {communication_data_type: fp32}}", "actor.engine: args are for engine deepspeed: remove them"),  # noqa: E501
    ("actor.engine={type: deepspeed, args: {gradient_clipping: 1.0, zero_optimization: {stage: 3}}}", "actor.engine: args.gradient_clipping cannot be set: set grad_clip, beside engine; args.zero_optimization.stage cannot be set: set zero_stage, beside args"),  # noqa: E501
    ("actor.engine={type: deepspeed, args: {comunication_data_type: fp32}}", "actor.engine: args.comunication_data_type is no argument of DeepSpeed that Ratchet passes on: write communication_data_type"),  # noqa: E501
    ("pools.all.runtime_env={env_vars: {A: 1}}", "pools.all: runtime_env.env_vars should map names to texts: quote numbers"),  # noqa: E501
    ("pools.all.runtime_env={pips: [x]}", "pools.all: runtime_env.pips is no argument of Ray's runtime environment: write pip"),  # noqa: E501
    ("pools.all.runtime_env={env_vars: {CUDA_VISIBLE_DEVICES: '0'}}", "pools.all: runtime_env.env_vars.CUDA_VISIBLE_DEVICES cannot be set: set gpus_per_worker"),  # noqa: E501
    ("model.args={torch_dtype: half}", "model: args.torch_dtype cannot be set: set model.dtype"),
    ("rollout={engine: vllm, top_p: 0.9, temperature: 0.7}", "with rollout.top_p 0.9, rollout.temperature must be 1 (or 0), but is 0.7"),  # noqa: E501
    ("rollout={engine: vllm, min_p: 0.1, temperature: 0.7}", "rollout.engine vllm gives log-probs either before min_p or at a temperature, not both: with rollout.min_p 0.1, rollout.temperature must be 1 (or 0), but is 0.7"),  # noqa: E501
    ("rollout={engine: {type: server, urls: 'http://a:1', api: sglang}, min_p: 0.1}", "rollout.engine.api sglang has no min_p for requests with a seed: remove rollout.min_p, or set rollout.seeds to engine"),  # noqa: E501
    ("rollout={engine: {type: server, urls: 'http://a:1', api: tgi}, top_k: 8, min_p: 0.1}", "rollout.engine.api tgi has no min_p: remove rollout.min_p"),  # noqa: E501
    ("rollout.repetition_penalty=1.1", "rollout.repetition_penalty is not supported: it lowers a token's probability by what came before, which the trainer's log-probs do not"),  # noqa: E501
    ("rollout={engine: {type: vllm, max_model_len: 100}}", "rollout.engine.max_model_len is 100, less than data.max_prompt_tokens + rollout.max_response_tokens = 1024: raise it"),  # noqa: E501
    ("pools={all: {workers: 6, gpus_per_worker: 1}}; rollout={engine: {type: vllm, tensor_parallel: 4}}", "rollout.engine.tensor_parallel is 4, the GPUs of 4 workers, but pools.all.workers is 6, which is not a multiple of 4: change one of them"),  # noqa: E501
    ("pools={all: {workers: 4, gpus_per_worker: 2}}; rollout={engine: {type: vllm, tensor_parallel: 3}}", "rollout.engine.tensor_parallel is 3, which is not a multiple of pools.all.gpus_per_worker (2): change one of them"),  # noqa: E501
    ("pools={all: {workers: 2, gpus_per_worker: 0.5}}; rollout={engine: {type: vllm, tensor_parallel: 2}}", "rollout.engine.tensor_parallel is 2, but the workers of pools.all share GPUs (gpus_per_worker 0.5): set pools.all.gpus_per_worker to 1"),  # noqa: E501
    ("reference.mix=0.5", "reference.mix is set, but the reference never changes: set reference.sync_every, too"),
    ("reference.sync_every=4", "reference.sync_every is set, but nothing reads the reference: set algorithm.kl.in_loss or algorithm.kl.in_reward, or remove it"),  # noqa: E501
    ("algorithm.kl.in_loss=0.1; reference={sync_every: 4, model: m}", "reference.sync_every moves the reference to the actor, so reference.model would be lost: remove one"),  # noqa: E501
    ("algorithm.kl.in_loss=0.1; reference.sync_every=4; pools={a: {}, b: {}}; placement={actor: a, critic: a, rollout: a, reference: b}", "reference.sync_every reads the actor's weights, which are in another pool: place actor and reference in the same pool"),  # noqa: E501
    ("model.lora={}; actor.ema_decay=0.99", "actor.ema_decay averages whole models and does not work with model.lora: remove one of them"),  # noqa: E501
    ("actor.ema_decay=1", "actor.ema_decay is 1: input should be less than 1"),
    ("rollout.engine=server", "rollout.engine.urls is missing: set it"),
    ("rollout={engine: {type: server, urls: 'http://a:1'}}; model.lora={}", "rollout.engine server cannot load adapters"),  # noqa: E501
    ("rollout={engine: {type: server, urls: 'http://a:1'}, router_replay: true}", "rollout.router_replay needs the experts that the rollout chose, which rollout.engine server does not return: use hf or vllm"),  # noqa: E501
    ("rollout={engine: {type: vllm, prefix_caching: false}, router_replay: true}", "rollout.router_replay with rollout.engine vllm needs its prefix cache"),  # noqa: E501
    ("rollout.router_replay=true; model.kernels=compile", "rollout.router_replay does not work with model.kernels compile: set model.kernels to torch"),  # noqa: E501
    ("critic=null", "critic is null, but algorithm.advantage gae needs values: leave critic out"),
    ("algorithm.advantage={type: grpo}; critic.warmup_iterations=1", "critic.warmup_iterations is set, but algorithm.advantage grpo has no critic: remove it"),  # noqa: E501
    ("algorithm.advantage={type: grpo}; rollout.n=1", "algorithm.advantage grpo compares the trajectories of a prompt, but rollout.n is 1: raise rollout.n"),  # noqa: E501
    ("algorithm.dynamic_sampling.max_prompts=128; rollout.n=1", "algorithm.dynamic_sampling compares the trajectories of a prompt, but rollout.n is 1: raise rollout.n"),  # noqa: E501
    ("algorithm.advantage.drop_zero_std_groups=true; rollout.n=1", "algorithm.advantage.drop_zero_std_groups compares the trajectories"),  # noqa: E501
    ("algorithm.dynamic_sampling.max_prompts=63", "algorithm.dynamic_sampling.max_prompts is 63, less than data.prompts_per_iteration 64: raise it"),  # noqa: E501
    ("algorithm.overlong_penalty.buffer_tokens=513", "algorithm.overlong_penalty.buffer_tokens is 513, more than rollout.max_response_tokens 512: lower it"),  # noqa: E501
    ("algorithm.advantage=egpo; algorithm.rollout_correction.bypass=true", "algorithm.advantage egpo needs the entropy"),  # noqa: E501
    ("algorithm.advantage=optimal_token_baseline; algorithm.rollout_correction.bypass=true", "algorithm.advantage optimal_token_baseline needs the squared probabilities"),  # noqa: E501
    ("algorithm.advantage=gfpo; rollout.n=4", "algorithm.advantage.keep is 4, and rollout.n 4: gfpo would leave no answer out"),  # noqa: E501
    ("algorithm.rollout_correction={bypass: true, weights: {}}", "algorithm.loss ppo has the ratio to the rollout already: remove weights, or set algorithm.loss: gpg"),  # noqa: E501
    ("algorithm.advantage={type: gdpo, parts: [a]}; algorithm.kl.in_reward=0.1", "algorithm.kl.in_reward would do nothing: use algorithm.kl.in_loss"),  # noqa: E501
    ("validation.every=1", "validation.every is set without validation.data: name a prompt file, or set validation.every=0"),  # noqa: E501
    ("validation.patience=2", "validation.patience is set without validation.data: name a prompt file, or set validation.patience=null"),  # noqa: E501
    ("validation.metric=m", "validation.metric is set without validation.data: name a prompt file, or set validation.metric=null"),  # noqa: E501
    ("checkpoint.keep.best=1", "checkpoint.keep.best is set without validation.data: name a prompt file, or set checkpoint.keep.best=0"),  # noqa: E501
    ("placement=separate", "placement is separate, but there are no pools: name them in pools"),
    ("pools={a: {}, b: {}}", "placement is colocated, but there are 2 pools: keep one, or map each role to a pool in placement"),  # noqa: E501
    ("pools={a: {}}; placement=separate", "placement puts the actor in actor, the critic in critic and the rollout in rollout: name pools so, or map each role to one of the pools (a)"),  # noqa: E501
    ("pools={a: {}}; placement={actor: b, critic: a}", "placement puts the actor in b and the rollout in no pool: map each to one of the pools (a)"),  # noqa: E501
    ("actor.engine.tensor_parallel=2", "actor.engine.tensor_parallel is no option of torch, but of fsdp and megatron"),
    ("actor={engine: {type: deepspeed, zero_stage: 3, offload: true}, offload_when_idle: true}", "actor.engine.offload already keeps the state in host memory"),  # noqa: E501
    ("model.lora={}; actor.engine=megatron; critic.engine=megatron", "model.lora is not supported yet by engine megatron: remove it, or set actor.engine and critic.engine to fsdp"),  # noqa: E501
    ("model.kernels=compile; actor.engine=deepspeed; critic.engine=deepspeed", "model.kernels compile does not work with actor.engine deepspeed and critic.engine deepspeed: set model.kernels to torch"),  # noqa: E501
    ("reference={model: {path: m, lora: {}}}", "reference.model.lora is set, but the reference does not learn: remove it"),  # noqa: E501
    ("algorithm.distillation={}", "algorithm.distillation is set without a teacher: set teacher.path"),
    ("algorithm.advantage=none; teacher.path=t", "teacher is set, but nothing learns from it: set algorithm.distillation={}, or remove it"),  # noqa: E501
    ("teacher=t; algorithm.distillation.divergence=jsd", "algorithm.distillation.divergence jsd sums over the teacher's most likely tokens, and teacher.top_k is 0: set teacher.top_k=64"),  # noqa: E501
    ("teacher={path: t, top_k: 8}; algorithm.distillation={}; actor.engine={type: fsdp, tensor_parallel: 2}; pools={gpus: {workers: 2}}", "teacher.top_k is not supported yet by actor.engine.tensor_parallel, whose processes have a part of the vocabulary each: set teacher.top_k=0 with algorithm.distillation.divergence=sampled, or another actor.engine"),  # noqa: E501
    ("algorithm.advantage=none", "algorithm.advantage none leaves nothing to learn from: set algorithm.distillation, or another advantage"),  # noqa: E501
    ("teacher={path: t, lora: {}}; algorithm.distillation={}", "teacher.lora is set, but the teacher does not learn: remove it"),  # noqa: E501
    ("teacher={path: t, engine: {urls: 'http://a:1'}}; algorithm.distillation={}; rollout.temperature=0.5", "teacher.engine server gives log-probs at temperature 1, and rollout.temperature is 0.5: set it to 1, or remove teacher.engine"),  # noqa: E501
    ("teacher={models: {a: {path: t, engine: {urls: 'http://a:1'}, dtype: float32}}}; algorithm.distillation={}", "teacher.models.a.dtype is set, but servers compute the teacher: set it there, and remove it here"),  # noqa: E501
    ("teacher={path: t, align: text, top_k: 4}; algorithm.distillation={}", "teacher.align text compares log-probs of whole texts, and teacher.top_k asks for other tokens: set teacher.top_k=0 with algorithm.distillation.divergence=sampled"),  # noqa: E501
    ("teacher={path: t, align: text}; algorithm.distillation={}; rollout.environment=calculator", "teacher.align text reads a prompt and its answer, and a rollout.environment or a rollout.agent has more turns"),  # noqa: E501
    ("teacher={top_k: 4}; algorithm.distillation={}", "teacher: path and models are both missing: set path"),
    ("teacher={path: t, models: {a: u}}; algorithm.distillation={}", "teacher: path and models are both set: move path to the models that it is for"),  # noqa: E501
    ("reward.function=null", "reward.function names no function: set a function"),
    ("rollout.agent=a.py:run; rollout.environment=calculator", "rollout.agent and rollout.environment are both set"),
    ("rollout.agent=a.py:run; reward.model={path: m, kind: process}", "reward.model.kind process scores the steps of one response"),  # noqa: E501
    ("rollout.environment=calculator; rollout.ignore_eos=true", "rollout.environment does not work with rollout.ignore_eos"),  # noqa: E501
    ("reward={function: judge, judge: {url: 'http://a:1/v1', model: m, mode: pairwise}}; validation={data: v.jsonl, n: 1}", "reward.judge.mode pairwise compares the responses to a prompt, but validation.n is 1: raise validation.n, or use"),  # noqa: E501
    ("reward={function: judge, judge: {url: 'http://a:1/v1', model: m, mode: pairwise}}; algorithm.advantage=remax", "but algorithm.advantage remax scores greedy answers, each of which is alone"),  # noqa: E501
    ("reward={function: judge, judge: {url: 'http://a:1/v1', model: m, mode: pairwise}}; algorithm={advantage: {type: grpo, drop_zero_std_groups: true}, dynamic_sampling: {max_prompts: 128}}; data.curriculum={solved_score: 1}; rollout.n=1", "algorithm.advantage grpo, algorithm.advantage.drop_zero_std_groups, algorithm.dynamic_sampling, reward.judge.mode pairwise and data.curriculum compare the trajectories of a prompt, but rollout.n is 1: raise rollout.n"),  # noqa: E501
    ("rollout.partial=true", "rollout.partial requires rollout.mode async, but rollout.mode is sync"),
    ("rollout.max_staleness=4", "rollout.max_staleness is 4, which requires rollout.mode async, but rollout.mode is sync: remove it"),  # noqa: E501
    ("actor.engine={type: fsdp, tensor_parallel: 2, sequence_parallel: 2}", "actor.engine: tensor_parallel and sequence_parallel do not work together: remove one of them"),  # noqa: E501
    ("actor.engine.offload=true", "actor.engine.offload is no option of torch, but of fsdp and deepspeed: remove it, or set actor.engine.type to fsdp or deepspeed"),  # noqa: E501
    ("actor={engine: {type: fsdp, zero_stage: 3}}", "actor.engine.zero_stage is no option of fsdp, but of deepspeed: remove it, or set actor.engine.type to deepspeed"),  # noqa: E501
    ("rollout.engine.enforce_eager=true", "rollout.engine.enforce_eager is no option of hf, but of vllm: remove it, or set rollout.engine.type to vllm"),  # noqa: E501
    ("rollout.engine.urls=http://a:1", "rollout.engine.urls is no option of hf, but of server: remove it, or set rollout.engine.type to server"),  # noqa: E501
    ("rollout.seeds=engine", "rollout.seeds engine is for rollout.engine vllm and server"),
    ("rollout={engine: vllm, seeds: engine}; run.deterministic=true", "rollout.seeds engine draws responses that cannot be repeated"),  # noqa: E501
    ("rollout={engine: {type: server, urls: 'http://a:1', api: tgi, weights_folder: w}}", "rollout.engine.api tgi cannot load new weights"),  # noqa: E501
    ("data.generations=r; algorithm.rollout_correction.bypass=true", "data.generations uses the generations of another policy"),  # noqa: E501
    ("rollout.workers=true; rollout.mode=one_step_off; rollout.engine=vllm", "rollout.workers does not work with rollout.mode one_step_off (use sync)"),  # noqa: E501
    ("data.generations=r; train.epochs=1", "train.epochs is set, but data.generations draws no prompts: remove one of them"),  # noqa: E501
    ("train.epochs=1; algorithm.dynamic_sampling.max_prompts=128", "train.epochs is set, but algorithm.dynamic_sampling draws as many prompts as it needs"),  # noqa: E501
    ("data.curriculum={solved_score: 1, lag: 1}; rollout.mode=one_step_off", "data.curriculum.lag is 1, but rollout.mode one_step_off draws 1 iterations ahead"),  # noqa: E501
    ("data.curriculum={}; reward.function=length", "data.curriculum needs the smallest score of a solved answer"),
    ("data.replay={}; rollout.environment=calculator", "data.replay does not work with rollout.environment: remove one of them"),  # noqa: E501
    ("data.replay={}; algorithm.rollout_correction.bypass=true", "data.replay draws answers of earlier policies"),
    ("data.replay={files: [x], answers: 4}", "data.replay.answers is 4, and rollout.n 4: no answer is left to the policy: raise rollout.n"),  # noqa: E501
    ("data.replay={files: [x]}; algorithm.advantage=grpo; rollout.n=1", "algorithm.advantage grpo compares the trajectories of a prompt, but rollout.n is 1: raise rollout.n"),  # noqa: E501
    ("data.replay={files: [x], answers: 3}; algorithm.advantage=grpo; algorithm.experts=sft", "algorithm.experts sft compares the policy's own answers with each other"),  # noqa: E501
    ("data.replay={files: [x]}; algorithm.experts=sft", "algorithm.experts sft gives an expert's answers no returns that a critic could learn"),  # noqa: E501
    ("algorithm.advantage=gigpo", "algorithm.advantage gigpo is for turns, but there is no rollout.environment or rollout.agent"),  # noqa: E501
    ("algorithm.advantage=vine_ppo; rollout.agent=m:f", "algorithm.advantage vine_ppo plays on from turns, which a rollout.agent cannot: use a rollout.environment, or gigpo"),  # noqa: E501
    ("algorithm.advantage=vine_ppo; rollout.environment=calculator; algorithm.overlong_penalty.buffer_tokens=9", "algorithm.advantage vine_ppo and algorithm.overlong_penalty, which its values leave out, are both set: remove one"),  # noqa: E501
    ("algorithm.advantage=vine_ppo; rollout.environment=calculator; reward={function: judge, judge: {url: 'http://a:1/v1', model: m, mode: pairwise}}", "reward.judge.mode pairwise compares the responses to a prompt, but algorithm.advantage vine_ppo scores continuations of different turns: use reward.judge.mode rubric, or another estimator (gigpo)"),  # noqa: E501
    ("algorithm.kl={in_loss: 0.1, loss_estimator: k1}", "algorithm.kl.loss_estimator k1 has a gradient of 0 on average"),  # noqa: E501
    ("validation={every: 2, metric: m, patience: 1}; checkpoint.keep.best=2", "validation.every, validation.metric, validation.patience and checkpoint.keep.best are set without validation.data: name a prompt file, or set validation.every=0, validation.metric=null, validation.patience=null and checkpoint.keep.best=0"),  # noqa: E501
    ("actor.lr_schedule.type=cosine", "actor.lr_schedule: a cosine schedule needs decay_iterations"),
    # overrides that are none
    ("actor.lr", "'actor.lr' is not an override: write key.subkey=value"),
    ("=1", "'=1' is not an override"),
    ("++=1", "'++=1' is not an override"),
    ("actor.lr=[1", "'[1' is not a YAML value"),
]  # fmt: skip
"""Overrides with one mistake, and what the error says."""


@pytest.mark.parametrize(("override", "says"), WRONG)
def test_what_is_wrong_is_said_in_one_line(file: Path, override: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config(file, override.split("; "))
    message = str(refused.value)
    assert says in message
    assert "\n" not in message
    assert refused.value.exit_code == 2


def test_a_data_section_that_is_missing_names_its_key(file: Path) -> None:
    """As many lines as keys to set, each of which is the fix."""
    file.write_text("{}")
    with pytest.raises(UserError) as refused:
        load_config(file)
    said = [line.removeprefix(f"{file}: ") for line in str(refused.value).splitlines()]
    assert said == ["model.path is missing: set it", "data.train is missing: set it"]
    assert load_config(file, [f"{line.split()[0]}=somewhere" for line in said]).model.path == "somewhere"


@pytest.mark.slow
def test_every_combination_that_is_refused_is_tried_alone(file: Path) -> None:
    """So that each is known to give one line: `WRONG` reaches every `yield` of the combinations."""
    path = Path(incompatibilities.__file__)
    yields = {node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Yield)}
    reached = set[int]()

    def trace(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        if frame.f_code.co_filename != str(path):
            return None
        reached.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    for override, _ in WRONG:
        sys.settrace(trace)
        try:
            with suppress(UserError):
                load_config(file, override.split("; "))
        finally:
            sys.settrace(before)
    missed = [path.read_text().splitlines()[line - 1 : line + 1] for line in sorted(yields - reached)]
    assert not missed, "add a case to WRONG"


def test_all_mistakes_are_said_at_once(file: Path) -> None:
    with pytest.raises(UserError) as refused:
        load_config(file, ["rollout.n=0", "actor.lrr=1", "actor.share_prompts=maybe", "data.train=3", "trainer=1"])
    keys = [line.removeprefix(f"{file}: ").split()[0] for line in str(refused.value).splitlines()]
    assert sorted(keys) == ["actor.lrr", "actor.share_prompts", "data.train", "rollout.n", "trainer"]


def test_all_combinations_that_do_not_work_are_said_at_once(file: Path) -> None:
    with pytest.raises(UserError) as refused:
        load_config(
            file,
            [
                "validation.every=1",
                "actor.engine={type: fsdp, tensor_parallel: 2}",
                "critic=null",
                "pools={a: {workers: 3}}",
            ],
        )
    keys = [line.removeprefix(f"{file}: ").split()[0] for line in str(refused.value).splitlines()]
    assert keys == ["critic", "actor.engine.tensor_parallel", "validation.every"]


def test_a_mistake_of_actor_and_reference_is_said_once(file: Path) -> None:
    """The reference is computed as the actor is, and has no such keys."""
    with pytest.raises(UserError) as refused:
        load_config(file, ["algorithm={advantage: grpo, kl: {in_loss: 0.1}}", "actor.mini_batch_trajectories=100"])
    sizes = "data.prompts_per_iteration 64 x rollout.n 4 = 256"
    line = f"{file}: actor.mini_batch_trajectories is 100, which does not divide 256 ({sizes}): change one of them"
    assert str(refused.value) == line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", "should hold sections"),
        ("a: b: c", "is not valid YAML"),
        ("", "should hold sections"),
        (None, "No such"),
    ],
)
def test_what_is_no_config_file(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=says) as refused:
        load_config(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_overrides_are_yaml_and_the_last_one_counts(file: Path) -> None:
    config = load_config(
        file,
        ["actor.lr=2", "actor.lr=3e-6", "critic.grad_clip=null", "algorithm.advantage={type: grpo}", "run.name=a-1.b"],
    )
    assert config.actor.lr == 3e-6
    assert config.critic is not None
    assert config.critic.grad_clip is None
    assert config.algorithm.advantage == GRPO()
    assert config.run.name == "a-1.b"


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", ".1e-4", "0.00001", '"1e-5"'])
def test_numbers_are_those_that_people_mean(tmp_path: Path, text: str) -> None:
    """YAML 1.1 reads 1e-5 as text."""
    path = tmp_path / "run.yaml"
    path.write_text(f"{yaml.safe_dump(MINIMAL)}\nactor: {{lr: {text}, micro_batch_tokens: 1e4}}\n")
    assert load_config(path).actor.lr == 1e-5
    assert load_config(path, [f"actor.lr={text}"]).actor.micro_batch_tokens == 10_000


def test_null_switches_a_section_off_and_minus_one_top_k(file: Path) -> None:
    on = ["validation={data: held_out.parquet, every: 2}", "pools={a: {}}", "tracking=wandb", "algorithm.kl.in_loss=1"]
    off = ["validation=null", "pools=null", "tracking=null", "algorithm.kl=null"]
    assert load_config(file, [*on, *off]) == load_config(file, [])
    assert load_config(file, ["validation=null", "validation.data=a"]).validation.data == "a"
    assert load_config(file, ["rollout.top_k=-1"]) == load_config(file, ["rollout.top_k=0"])
    schedule = ["actor.lr_schedule={type: linear, decay_iterations: 3}", "actor.lr_schedule=null"]
    assert load_config(file, schedule) == load_config(file, [])
    for key, says in (
        ("data.train=null", "data.train is []: "),
        ("rollout.top_k=-2", "rollout.top_k is -2: input should be greater than or equal to 0"),
        ("checkpoint=null", "checkpoint is None: it should be a section"),  # which would not mean none
    ):
        with pytest.raises(UserError, match=re.escape(says)):
            load_config(file, [key])


def test_text_that_looks_like_a_number_stays_text(file: Path) -> None:
    config = load_config(file, ["run.name='12e45'"])
    assert config.run.name == config.with_values({"train.iterations": 3}).run.name == "12e45"


def test_frozen_and_round_trip() -> None:
    config = parse_config(MINIMAL, "here").with_values(
        {"algorithm.advantage": {"type": "grpo"}, "critic": None, "algorithm.kl.in_loss": 0.1}
    )
    assert parse_config(json.loads(json.dumps(config.model_dump(mode="json"))), "there") == config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ValidationError, match="frozen"):
        config.actor.lr = 1.0  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.algorithm.advantage.epsilon = 1.0  # type: ignore[misc, union-attr]


def test_with_values_validates_again() -> None:
    config = parse_config(MINIMAL, "here")
    assert config.with_values({"rollout.n": 8}).value("rollout.n") == 8
    assert config.value("rollout.n") == 4
    with pytest.raises(UserError, match=r"rollout\.n is 0"):
        config.with_values({"rollout.n": 0})


def test_which_stages_exist() -> None:
    config = parse_config(MINIMAL, "here")
    assert not config.with_values({"algorithm.advantage": {"type": "grpo"}}).needs_critic
    assert config.with_values({"algorithm.kl.in_loss": 0.0}).needs_reference
    on_policy = config.with_values({"actor.mini_batch_trajectories": 256})
    assert (on_policy.on_policy, on_policy.needs_old_log_probs) == (True, False)
    assert on_policy.with_values({"algorithm.kl.in_reward": 0.1}).needs_old_log_probs
    assert not on_policy.with_values({"actor.ppo_epochs": 2}).on_policy
    assert not config.with_values({"algorithm.loss": "gpg"}).needs_old_log_probs
    bypass = config.with_values({"algorithm.rollout_correction": {"bypass": True}, "algorithm.kl.in_reward": 0.1})
    assert not bypass.needs_old_log_probs
    corrected = on_policy.with_values({"algorithm.rollout_correction": {"weights": {}}})
    assert corrected.needs_old_log_probs
    assert on_policy.with_values({"algorithm.advantage": "egpo"}).needs_old_log_probs
    assert config.with_values({"algorithm.advantage": "remax"}).needs_greedy_scores
    assert not config.needs_greedy_scores
    sampling = config.with_values({"algorithm.dynamic_sampling.max_prompts": 200})
    assert (sampling.selects, sampling.max_prompts) == (True, 200)
    assert (config.selects, config.max_prompts) == (False, 64)


@pytest.mark.parametrize(
    ("changes", "is_corrected"),
    [
        ({}, False),
        ({"rollout.mode": "async"}, True),
        ({"rollout.engine": "vllm"}, True),
        ({"rollout.engine": "vllm", "model.dtype": "float32"}, False),
        ({"rollout.engine": "vllm", "model.dtype": "float32", "rollout.engine.quantization": "fp8"}, True),
        ({"rollout.engine": {"type": "vllm", "args": {"kv_cache_dtype": "fp8"}}, "model.dtype": "float32"}, True),
        ({"rollout.engine": {"type": "vllm", "args": {"max_num_seqs": 8}}, "model.dtype": "float32"}, False),
        ({"rollout.engine": "server", "rollout.engine.urls": ["http://127.0.0.1:1"]}, True),
        ({"rollout.engine": "vllm", "algorithm.rollout_correction": {}}, False),
    ],
)
def test_another_policy_than_the_trainers_is_corrected_by_default(changes: dict[str, Any], is_corrected: bool) -> None:
    config = parse_config(MINIMAL, "here").with_values(changes)
    correction = config.algorithm.rollout_correction
    assert (correction is not None and correction.weights is not None) == is_corrected
    assert config.needs_old_log_probs or not is_corrected
    again = stored_config(config.model_dump(mode="json"), "a claim")
    assert again.algorithm.rollout_correction == correction, "what is stored means the same ever after"


def test_every_key_is_documented_and_every_default_is_yaml() -> None:
    for key, kind, default, meaning in keys(RunConfig):
        assert meaning, key
        assert kind, key
        assert default == "required" or yaml_text(yaml.safe_load(default)) == default, key
    assert {"actor.lr", "critic", "critic.lr", "algorithm.advantage[grpo].epsilon"} <= {
        key for key, *_ in keys(RunConfig)
    }


def test_there_is_an_example() -> None:
    assert len(EXAMPLES) > 0


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    load_config(path)


def test_reading_a_config_imports_nothing_heavy(file: Path) -> None:
    code = (
        "import sys, ratchet.rlhf.algorithms, ratchet.rlhf.config, ratchet.rlhf.stage_config\n"
        f"ratchet.rlhf.config.load_config({str(file)!r}, ['algorithm.advantage={{type: grpo}}'])\n"
        "heavy = {'torch', 'transformers', 'prefect', 'pyarrow', 'pandas', 'vllm', 'ray', 'deepspeed'}\n"
        "sys.exit(', '.join(heavy & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == ""
    assert done.returncode == 0


def test_options_alone_keep_the_algorithm() -> None:
    config = parse_config({**MINIMAL, "algorithm": {"advantage": {"type": "rloo"}}}, "here")
    changed = config.with_values({"algorithm.advantage": {"whiten": True}}).algorithm.advantage
    assert (changed.type, changed.whiten) == ("rloo", True)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("rollout.environment=calculator", "rollout.environment.max_turns=2"),
        ("algorithm.advantage=reinforce_plus_plus", "algorithm.advantage.gamma=0.5"),
        ("critic.model=other", "critic.model.dtype=float32"),
    ],
)
def test_a_text_for_a_section_and_keys_of_the_section_compose(file: Path, text: str, inside: str) -> None:
    """In either order, over whatever the file has, and where only the file has the text."""
    key, _, value = inside.partition("=")
    composed = load_config(file, [text, inside])
    assert str(composed.value(key)) == value
    assert load_config(file, [inside, text]) == composed
    assert load_config(file, [f"++{text}", f"+{inside}"]) == composed
    section, _, name = text.partition("=")
    assert load_config(file, [f"{section}={{{key.rpartition('.')[2]}: 9}}", inside, text]) == composed
    tree = yaml.safe_load(file.read_text())
    holder, _, last = section.rpartition(".")
    tree[holder] = {last: name}
    file.write_text(yaml.safe_dump(tree))
    assert load_config(file, [inside]) == composed


def test_a_part_of_a_config_need_not_fit_the_rest() -> None:
    """A replay looks at an update's keys, as they were then, among others as they are now."""
    config = parse_config({**MINIMAL, "algorithm": {"advantage": "egpo"}}, "here")
    then = {"algorithm.rollout_correction": {"bypass": True}, "actor.mini_batch_trajectories": 9999}
    assert config.as_committed(then).bypass
    with pytest.raises(UserError, match="egpo needs the entropy"):
        config.with_values(then)
    assert config.as_committed({"critic": None}).value("critic.model") is None


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.kl.reward_estimator=k3", "k3 in the reward does not hold the policy near the reference"),
        ("algorithm.kl.reward_estimator=k1+", "in the reward there is none: write k1"),
        ("algorithm.kl={in_loss: 0.1, loss_estimator: k1}", "loss_estimator k1 has a gradient of 0 on average"),
    ],
)
def test_estimators_of_the_kl_that_do_not_do_what_they_seem_to_are_refused(
    file: Path, override: str, says: str
) -> None:
    with pytest.raises(UserError) as refused:
        load_config(file, [override])
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("workers", "gpus_per_worker", "tensor_parallel", "size"),
    [(8, 1, 1, 1), (8, 1, 2, 2), (8, 1, 8, 8), (4, 2, 8, 4), (2, 4, 4, 1), (1, 8, 2, 1), (2, 0, 2, 2), (4, 0.5, 1, 1)],
)
def test_a_vllm_spans_one_worker_or_several_whole_ones(
    workers: int, gpus_per_worker: float, tensor_parallel: int, size: int
) -> None:
    pools = {"all": {"workers": workers, "gpus_per_worker": gpus_per_worker}}
    changes = {"rollout.engine": "vllm", "rollout.engine.tensor_parallel": tensor_parallel}
    assert parse_config(MINIMAL, "here").with_values({"pools": pools} | changes).rollout_team_size == size
    assert parse_config(MINIMAL, "here").with_values(changes).rollout_team_size == 1, (
        "the driver's process sees all its GPUs"
    )
