"""Writes the model card of an exported model (README.md): its origin, for people who have only the folder."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import yaml
from pydantic import BaseModel

from ratchet.infra.runs.run import ADAPTER_CONFIG
from ratchet.infra.store.manifest import Checkpoint
from ratchet.infra.store.records import Claim, StageCommit
from ratchet.infra.store.run_store import UPDATE_ACTOR
from ratchet.rlhf.algorithms import KLPenalty
from ratchet.rlhf.config import ModelConfig, RewardTraining, RunConfig, SFTConfig, stored_config
from ratchet.rlhf.config.published import published, published_text
from ratchet.rlhf.config.roles import ROLES, is_critic
from ratchet.rlhf.data.hub_datasets import IN_PLACE, hub_dataset, is_cached
from ratchet.rlhf.errors import counted
from ratchet.rlhf.models import lora
from ratchet.rlhf.models.hf_configs import model_config
from ratchet.rlhf.models.model_folders import base_models, hub_name
from ratchet.rlhf.models.tokenizers import has_chat_template
from ratchet.rlhf.schema import IMAGES, TRAJECTORY

if TYPE_CHECKING:
    from ratchet.infra.runs.run import Run

MEASURED = ("sft/", "reward/", "val/")
"""Prefixes of a fine-tuning run's metrics that measure its model."""
PACKAGES = {"ratchet-rlhf": "Ratchet", "torch": "torch", "transformers": "transformers"}
_ON_HUB = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)")


def model_card(run: Run, checkpoint: Checkpoint, base: str | None) -> str:
    """Writes the card of a snapshot of one role: Markdown with YAML metadata.

    It has no secrets and no absolute paths other than `base`, and names in it are shown as code, so that they are never
    markup.

    Args:
        base: the base model, as the code that loads an adapter names it; None: the folder has the whole model.
    """
    from huggingface_hub import ModelCard, ModelCardData

    name, version, role = run.store.url.rpartition("/")[2], checkpoint.weights.version, checkpoint.role
    claim = _trained_by(run, version)
    config = stored_config(claim.config, run.store.url)
    model = run.config.model_of(role)  # its path may have changed since
    metadata = ModelCardData(
        base_model=base_models(model) or None,
        datasets=_on_hub(config.data.train),
        library_name="transformers" if base is None else "peft",
        pipeline_tag="token-classification" if is_critic(role) else "text-generation",
        tags=["reinforcement-learning", *_algorithms(config), *(["lora"] if model.lora else []), "ratchet"],
    )
    iterations = counted(version, "iteration")
    body = f"""# {_code(name)}

This is the {ROLES[role].card} of the run {_code(name)} after {iterations} of reinforcement learning with Ratchet. It
started from {_model(model)}.

{_table(("", ""), [*_facts(config, model, is_merged=base is None), ("updates of the policy", _updates(run, version))])}

## Validation

{_validation(run, config, checkpoint, iterations)}

## Use

{_usage(run.config, role, name, base)}

## Origin

{_origin(name, checkpoint)}

Trained with {_packages(claim)}.

<details>
<summary>Config</summary>

Secrets and local folders are left out.

{_config(config)}

</details>
"""
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{body}"))


def fit_card(config: SFTConfig | RewardTraining, metrics: Mapping[str, float]) -> str:
    """Writes the card of a fine-tuning run's model, with the same care as `model_card`. `metrics` are the last
    round's."""
    from huggingface_hub import ModelCard, ModelCardData

    is_policy = isinstance(config, SFTConfig)
    auto = "AutoModelForCausalLM" if is_policy else "AutoModelForSequenceClassification"
    what = "supervised fine-tuning" if is_policy else "training a reward model on preferences (Bradley-Terry)"
    metadata = ModelCardData(
        base_model=base_models(config.model) or None,
        datasets=_on_hub([config.data]),
        library_name="transformers",
        pipeline_tag="text-generation" if is_policy else "text-classification",
        tags=["sft" if is_policy else "reward-model", "ratchet"],
    )
    facts = [("trained on", _data(config.data)), ("largest learning rate", f"{config.lr:g}")]
    rows = [(_code(name), f"{value:.4g}") for name, value in metrics.items() if name.startswith(MEASURED)]
    loads = [f"model = {auto}.from_pretrained(path)", "tokenizer = AutoTokenizer.from_pretrained(path)"]
    usage = "\n".join([f"from transformers import {auto}, AutoTokenizer", "", PATH, *loads])
    body = f"""# {_code(config.run.name)}

This model is the result of {what} with Ratchet. It started from {_model(config.model)}.

{_table(("", ""), [*facts, *rows])}

## Use

{_block(usage, "python")}

<details>
<summary>Config</summary>

Secrets and local folders are left out.

{_config(config)}

</details>
"""
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{body}"))


def _trained_by(run: Run, version: int) -> Claim:
    """Returns the claim of the driver that made a version of the weights; a later driver may have another config."""
    state = run.store.iteration_state(version - 1) if version else run.state
    assert state.claim is not None
    return state.claim


def _algorithms(config: RunConfig) -> list[str]:
    """Returns the algorithm by its common names: grpo, gspo; ppo for its own estimator and loss."""
    estimator, loss = config.algorithm.advantage.type, config.algorithm.loss.type
    return [name for name, usual in ((estimator, "gae"), (loss, "ppo")) if name != usual] or ["ppo"]


def _facts(config: RunConfig, model: ModelConfig, *, is_merged: bool) -> Iterable[tuple[str, str]]:
    data, rollout = config.data, config.rollout
    responses = f"{counted(rollout.n, 'response')} of at most {rollout.max_response_tokens} tokens"
    yield "advantage estimator", _code(config.algorithm.advantage.type)
    yield "policy loss", _code(config.algorithm.loss.type)
    yield "KL to the reference", _kl(config.algorithm.kl)
    yield "reward", _reward(config)
    yield "trained on the prompts of", ", ".join(map(_data, data.train))
    yield "each iteration", f"{counted(data.prompts_per_iteration, 'prompt')} × {responses}"
    if model.lora is not None:
        yield "LoRA", f"rank {model.lora.r}, {'merged into the weights' if is_merged else 'not merged'}"


def _updates(run: Run, version: int) -> str:
    """Counts the iterations that changed the policy: not those in which only the critic learned, or a gradient was not
    finite."""
    commits = (run.store.committed_stage(iteration, UPDATE_ACTOR) for iteration in range(version))
    updates = sum(isinstance(commit, StageCommit) for commit in commits)
    return f"{updates}, one in each iteration" if updates == version else f"{updates} in {version} iterations"


def _kl(kl: KLPenalty) -> str:
    places = (("reward", kl.in_reward, kl.reward_estimator), ("loss", kl.in_loss, kl.loss_estimator))
    terms = [
        f"in the {place}, coefficient {coefficient:g}, estimator {_code(estimator)}"
        for place, coefficient, estimator in places
        if coefficient is not None
    ]
    return "; ".join(terms) or "none"


def _reward(config: RunConfig) -> str:
    reward, environment = config.reward, config.rollout.environment
    parts = [reward.function] if isinstance(reward.function, str) else list(reward.function or ())
    parts = [_code(function) for function in parts]
    parts += [f"the reward model {_code(reward.model.path)}"] if reward.model is not None else []
    parts += [f"the environment {_code(environment.name)}"] if environment is not None else []
    return ", ".join(parts)


def _data(url: str) -> str:
    """Returns a data file or dataset by its name, without its folders or host."""
    dataset = _on_hub([url])
    return _code(dataset[0] if dataset else published_text(url).rstrip("/").rpartition("/")[2])


def trajectories_card(run: Run, schema: pa.Schema, counts: Mapping[str, int], without: Collection[str]) -> str:
    """Writes the card of a dataset of a run's trajectories, with the same care as `model_card`.

    Args:
        schema: the dataset's columns.
        counts: number of rows of each split.
        without: columns that were left out.
    """
    from huggingface_hub import DatasetCard, DatasetCardData

    name, config, trainer = run.store.url.rpartition("/")[2], run.config, run.trainer
    splits = [split for split, count in counts.items() if count]
    files = [{"split": split, "path": f"data/{split}-*.parquet"} for split in splits]
    metadata = DatasetCardData(
        configs=[{"config_name": "default", "data_files": files}],
        tags=[
            "reinforcement-learning",
            *(_algorithms(config) if trainer is None else []),
            "trajectories",
            "ratchet",
        ],
    )
    facts = [*_facts(config, config.model, is_merged=False)]
    if trainer is not None:  # of the training, this config knows no more
        facts = [("reward", _reward(config))] if config.observed is None else []
    started = f" The policy started\nfrom {_model(config.model)}." if config.knows_model else ""
    # of images the run has the digests
    meanings = {column.name: column.meaning for column in TRAJECTORY.columns}
    meanings[IMAGES] = "images among the tokens, in order"
    rows = [(_code(field.name), _code(str(field.type)), meanings.get(field.name, "")) for field in schema]
    left_out = f"\n\nColumns that were left out: {', '.join(map(_code, without))}." if without else ""
    body = f"""# {_code(name)}

These are the trajectories of the run {_code(name)} in {counted(run.state.iteration, "iteration")} of reinforcement
learning with {"Ratchet" if trainer is None else _code(trainer)}: {
        ", ".join(f"{counts[split]} rows in {_code(split)}" for split in splits)
    }.{started}

{_table(("", ""), facts) if facts else ""}

A row is a trajectory, with what all stages computed of it. In `validation`, `iteration` is the one before which the
validation ran, and columns that only training has are null. `[T]` has an element for each token of the
response.{left_out}

## Columns

{_table(("column", "type", "meaning"), rows)}
"""
    return str(DatasetCard(f"---\n{metadata.to_yaml()}\n---\n\n{body}"))


def _on_hub(urls: Sequence[str]) -> list[str] | None:
    """Returns the datasets of the hub among some files and datasets; None if there are none.

    A name without ``hf://`` may be that of a folder which is gone: it counts if the hub's cache has it.
    """
    urls = [f"{IN_PLACE}{url}" if (dataset := hub_dataset(url)) and is_cached(dataset) else url for url in urls]
    return list(dict.fromkeys(found[1] for url in urls if (found := _ON_HUB.match(url)))) or None


def _validation(run: Run, config: RunConfig, checkpoint: Checkpoint, iterations: str) -> str:
    """Tabulates the values before training and at a version."""
    first, now = (run.store.validation_metrics(version) for version in (0, checkpoint.weights.version))
    shown = [
        name for name in sorted({*first, *now}) if name.startswith("val-core/") or name == config.validation.metric
    ]
    if not shown:
        return "These weights were not validated."
    rows = [(_code(name), *(f"{row[name]:.4g}" if name in row else "–" for row in (first, now))) for name in shown]
    of_whom = "" if checkpoint.role == "actor" else "These are the values of the policy that was trained.\n\n"
    return of_whom + _table(("metric", "before training", f"after {iterations}"), rows)


def _usage(config: RunConfig, role: str, name: str, base: str | None) -> str:
    """Writes code that loads the folder, and that lets a policy answer, with transformers and with vLLM."""
    from ratchet.rlhf.models import scalar_heads

    model = config.model_of(role)
    auto = "AutoModelForTokenClassification" if is_critic(role) else "AutoModelForCausalLM"
    imports, paths = [f"from transformers import {auto}, AutoTokenizer"], [PATH]
    loads, parts = f"{auto}.from_pretrained(path)", list[str]()
    if is_critic(role) and scalar_heads.register(model_config(model)):
        imports = [f"from transformers import AutoConfig, {auto}, AutoTokenizer"]
        imports.append("from ratchet.rlhf.models import scalar_heads")
        paths.append("scalar_heads.register(AutoConfig.from_pretrained(path))  # transformers has no such critic")
    if base is not None:
        imports.insert(0, "from peft import PeftModel")
        labels = ", num_labels=1" if is_critic(role) else ""
        loads = f"PeftModel.from_pretrained({auto}.from_pretrained(base{labels}), path)"
        where = ""
        if hub_name(model) is None:
            where = "  # a folder of the machine that trained"
            parts.append(
                "The base model is a folder of the machine that trained. On another machine, put the path of a copy in "
                f"its place: here, and in {_code(ADAPTER_CONFIG)}."
            )
        paths.append(f"base = {json.dumps(base, ensure_ascii=False)}{where}")
    lines = [*imports, "", *paths, f"model = {loads}", "tokenizer = AutoTokenizer.from_pretrained(path)"]
    if is_critic(role):
        return "\n\n".join([*parts, _block("\n".join(lines), "python")])
    has_template = has_chat_template(config.model)
    code = _block("\n".join([*lines, "", *_answer(config, has_template)]), "python")
    route = "chat/completions" if has_template else "completions"
    served = f"Or with vLLM, whose server answers at {_code(f'v1/{route}')} as the model {_code(name)}:"
    return "\n\n".join([*parts, code, served, _block(_serve(model, name, base), "bash")])


PATH = 'path = "."  # this folder, or its name on the hub'


def _serve(model: ModelConfig, name: str, base: str | None) -> str:
    """Returns the command of vLLM's server for the folder in which it is called."""
    if base is None:
        return f"vllm serve . --served-model-name {shlex.quote(name)}"
    assert model.lora is not None
    rank = lora.served_rank(model.lora.r)
    adapter = f"--enable-lora --max-lora-rank {rank} --lora-modules {shlex.quote(f'{name}=.')}"
    return f"vllm serve {shlex.quote(base)} --tokenizer . {adapter}"


def _answer(config: RunConfig, has_template: bool) -> list[str]:
    """Writes code that samples an answer to a prompt, rendered as in training."""
    system = config.data.system_prompt
    before = [] if system is None else [{"role": "system", "content": published_text(system)}]
    messages = json.dumps([*before, {"role": "user", "content": "..."}], ensure_ascii=False)
    if has_template:
        inputs = (
            "tokenizer.apply_chat_template(\n"
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"\n)'
        )
    else:
        inputs = 'tokenizer("\\n".join(message["content"] for message in messages), return_tensors="pt")'
    limit = config.rollout.max_response_tokens
    return [
        f"messages = {messages}",
        f"inputs = {inputs}",
        f"answer = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens={limit})",
        'print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]


def _origin(name: str, checkpoint: Checkpoint) -> str:
    digest, version, role = _code(checkpoint.weights.digest), checkpoint.weights.version, checkpoint.role
    known = f"In the run's store, these weights with their optimizer state have the digest\n{digest}."
    if not ROLES[role].exported:  # the command line does not export it
        return known
    option = "" if role == "actor" else f" --role {role}"
    explain = _code(f"ratchet explain {shlex.quote(name)} {version}{option}")
    export = _code(f"ratchet export {shlex.quote(name)} DIR --iteration {version}{option}")
    return f"{known} With access to the store,\n{explain} shows what produced them, and\n{export} writes them again."


def _packages(claim: Claim) -> str:
    return ", ".join(f"{shown} {claim.packages[name]}" for name, shown in PACKAGES.items() if name in claim.packages)


def _config(config: BaseModel) -> str:
    tree = published(config.model_dump(mode="json"))
    return _block(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120).rstrip(), "yaml")


def _model(model: ModelConfig) -> str:
    name = hub_name(model)
    return _code(model.path) if name is None else f"[{_code(name)}](https://huggingface.co/{name})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (" | ".join(cell.replace("|", r"\|") for cell in cells) for cells in (head, ["---"] * len(head), *rows))
    return "\n".join(f"| {line} |" for line in lines)


def _code(text: str) -> str:
    """Formats text as inline code, in which Markdown and HTML mean nothing."""
    plain = "".join(character if character.isprintable() else " " for character in published_text(text))
    fence = "`" * (_longest_run(plain) + 1)
    pad = " " if plain.startswith("`") or plain.endswith("`") else ""
    return f"{fence}{pad}{plain}{pad}{fence}"


def _block(text: str, language: str) -> str:
    """Formats text as a block of code."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _longest_run(text: str) -> int:
    """Returns the length of the longest run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
