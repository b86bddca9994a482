"""Generates the reference pages in `docs/` (`main` lists them): `python -m ratchet.flows.reference [--check]`."""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import transformers
from pydantic import BaseModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from ratchet.flows.shown_metrics import CATALOGUE
from ratchet.infra.workers.call_log import CALL_COLUMNS
from ratchet.rlhf.algorithms.advantages import Advantage
from ratchet.rlhf.algorithms.distillation import Distillation
from ratchet.rlhf.algorithms.experts import Experts
from ratchet.rlhf.algorithms.kl import AdaptiveCoefficient, kl_divergence
from ratchet.rlhf.algorithms.masked import aggregate
from ratchet.rlhf.algorithms.policy_losses import PolicyLoss
from ratchet.rlhf.algorithms.reward_shaping import OverlongPenalty
from ratchet.rlhf.algorithms.rollout_correction import ImportanceWeights, Rejection, off_policy_metrics
from ratchet.rlhf.config import (
    DynamicSamplingConfig,
    RewardTraining,
    RunConfig,
    SFTConfig,
    keys,
    models_in,
    parse_config,
)
from ratchet.rlhf.config.counterparts import SOURCES, Counterpart, Source
from ratchet.rlhf.metrics import METRICS, timer
from ratchet.rlhf.models import families
from ratchet.rlhf.schema import TRAJECTORY, Column
from ratchet.tasks.canary import CANARY_COLUMNS
from ratchet.tasks.pipeline import STAGES, names_of
from ratchet.tasks.stage import RowsStage

DOCS = Path(__file__).resolve().parent.parent / "docs"

HEAD = """# Configuration

Generated from the models in `rlhf/config/` by `make docs`; `ratchet train --help` prints the same keys. Set a key
in the YAML file (as nested sections) or on the command line (`a.b=c`). Unknown keys are errors. Where a `type` selects
an algorithm, the keys of each choice follow in brackets. [migration.md](migration.md) lists the counterparts of the
settings of verl, TRL, OpenRLHF and prime-rl.

"""

MIGRATION = """# Coming from verl, TRL, OpenRLHF or prime-rl

Generated from the tables in `rlhf/config/counterparts/` by `make docs`. `ratchet convert` writes a config by these
tables, and errors about unknown keys quote them:

```console
$ ratchet convert run_qwen3_8b_fsdp.sh -o run.yaml
run.yaml: 33 keys; 9 settings have no counterpart: the comments at its end say why
$ ratchet convert trl.yaml --from trl --num_processes 8 -o run.yaml
$ ratchet convert train_dapo_ray.sh --from openrlhf -o run.yaml
$ ratchet convert rl.toml --from prime-rl -o run.yaml
```

It takes a YAML or TOML file, or a shell script that starts the program; a script is read, not run. Variables that the script
does not set have the values of this shell, and further settings may follow the file, as on the program's command line.
Every line of the config says which setting it comes from. Defaults of the program that differ from ours are written
out.

A setting without a counterpart is an error if it would change what is learned or measured, and so is an unknown setting.
The error names all of them and says what to do. A setting that changes only memory, speed, rounding, seeds or the order
within a batch becomes a comment, and so does each assumption. To change a refused setting, write it after the file with
another value; to remove it from a verl script, write `~data.video_key`, as in Hydra.

The number of iterations is computed from epochs if the data files can be read. Otherwise `train.epochs` is set. With
dynamic sampling, which does not go by epochs, the config is refused until you set `train.iterations`.

Sizes are converted to these units: `data.prompts_per_iteration` counts prompts, `actor.mini_batch_trajectories`
trajectories, and `actor.micro_batch_tokens` tokens; all but the last are totals over all processes.
"""
PEERS = """
## Their own examples

The examples of each program, as far as they are command lines or files of settings, converted by
`benchmarks/peers.py`. One that converts gives a valid config; models and data are not loaded, and whether the chosen
engines can see a model's images is checked at the start of the run. TRL's programs have data,
rewards and often the model in their code, so their commands alone lack `data.train`; a YAML file does not say which of
its trainers it is for, and is read as GRPO's.

"""


ALGORITHMS = """# Algorithms

Generated from `rlhf/algorithms/` by `make docs`. Every algorithm is a class whose fields are its configuration. Its
`needs` decide which stages an iteration runs in addition to `generate`, `score`, `advantages`, `update_actor` and
`close`. Recipes are in `examples/`. The formulas are checked against recorded values of the published implementations
(`tests/unit/test_oracles.py`).

## Your own

`algorithm.loss` and `algorithm.advantage` also take a class of your own code, as `package.module:Class` or `file.py:Class`,
whose fields get the values of `options`:

```python
# my_losses.py
from ratchet.rlhf.algorithms.policy_losses import TokenLoss


class TruncatedRatio(TokenLoss):
    \"\"\"The ratio, up to a limit.\"\"\"

    limit: float = 2.0

    def token_losses(self, log_probs, old_log_probs, advantages, mask):
        ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
        return -ratio.clamp(max=self.limit) * advantages, {"ratio": ratio}
```

```yaml
algorithm:
  loss: {type: my_losses.py:TruncatedRatio, options: {limit: 3.0}}
```

The metrics of a loss are averaged over the tokens and named `actor/ratio`. An estimator may return a dict of numbers after
advantages and returns ([metrics.md](metrics.md#your-own)). Before a run starts, Ratchet tries the class on
small random batches: shapes, finite values and gradients, masks, padding, micro-batches. `ratchet.testing.check_loss` and
`check_advantage` do the same in your tests. The stage depends on the source of the class's module: if you change it,
`ratchet plan` names it, and a fork continues from there. `CONTRIBUTING.md` shows an estimator, a stage and a callback.

Notation: $r_t$ reward of a token, $R$ sum of a trajectory's rewards, $A$ advantage, $\\rho$ ratio of the policy to the
old one, $\\pi$ probability of a token.

"""

REWARD = "ratchet reward-model"
ALWAYS = ("generate", "score", "advantages", "update_actor")
NAMES = {
    "group_ids": "groups (rollout.n > 1)",
    "greedy_scores": "greedy answers",
    "reward_parts": "parts of the reward",
    "sum_pi_squared": "squared probabilities",
    "turn_values": "values of turns (rollout.continuations)",
    "turns": "turns (rollout.environment)",
    "states": "what each turn follows",
}


def configuration() -> str:
    fits = "".join(
        f"\n## `{command}`\n\n{table(model)}"
        for command, model in (("ratchet sft", SFTConfig), (REWARD, RewardTraining))
    )
    return HEAD + table(RunConfig) + fits


def migration() -> str:
    parts = [MIGRATION]
    for source in SOURCES:
        parts.append(f"\n## {source.name}\n\n| {source.name} | here | note |\n|---|---|---|\n")
        parts += [_counterpart(source, row) for row in source.counterparts if row.theirs]
    return "".join([*parts, PEERS, (DOCS.parent / "benchmarks" / "peers.md").read_text()])


def _counterpart(source: Source, row: Counterpart) -> str:
    names = []
    for key in row.theirs:
        older = ", ".join(f"`{name}`" for name in source.older_names(key))
        names.append(f"`{key}` (older: {older})" if older else f"`{key}`")
    return f"| {', '.join(names)} | {', '.join(f'`{key}`' for key in row.ours) or '–'} | {row.note} |\n"


def table(model: type[BaseModel]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, kind, default, meaning in keys(model):
        lines.append(f"| `{key}` | {kind} | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def algorithms() -> str:
    parts = [ALGORITHMS]
    for title, key, union in (
        ("Advantages", "algorithm.advantage", Advantage),
        ("Policy losses", "algorithm.loss", PolicyLoss),
        ("Answers of experts", "algorithm.experts", Experts),
    ):
        classes = models_in(union)
        parts.append(f"## {title}: `{key}`\n\n| type | needs | stages it adds | paper |\n|---|---|---|---|\n")
        parts += [_row(key, algorithm) for algorithm in classes]
        parts += [f"\n### {_tag(algorithm)}\n\n{markdown(algorithm)}\n" for algorithm in classes]
        parts.append("\n")
    for title, described in (
        ("KL: `algorithm.kl.reward_estimator`, `algorithm.kl.loss_estimator`", kl_divergence),
        ("Adaptive KL coefficient: `algorithm.kl.controller`", AdaptiveCoefficient),
        ("Putting token losses together: `algorithm.loss.aggregate`", aggregate),
        ("Rollout correction: `algorithm.rollout_correction.weights`", ImportanceWeights),
        ("Rollout correction: `algorithm.rollout_correction.rejection`", Rejection),
        ("Rollout correction: metrics `rollout_corr/*`", off_policy_metrics),
        ("Overlong penalty: `algorithm.overlong_penalty`", OverlongPenalty),
        ("On-policy distillation: `algorithm.distillation`", Distillation),
        ("Dynamic sampling: `algorithm.dynamic_sampling`", DynamicSamplingConfig),
    ):
        parts.append(f"## {title}\n\n{markdown(described)}\n\n")
    return "".join(parts).rstrip() + "\n"


def _tag(algorithm: type) -> str:
    return str(algorithm.model_fields["type"].default)  # type: ignore[attr-defined]


def _row(key: str, algorithm: type) -> str:
    needs = ", ".join(NAMES.get(name, name.replace("_", " ")) for name in algorithm.needs)  # type: ignore[attr-defined]
    options = {"type": _tag(algorithm), **({"parts": ["score"]} if _tag(algorithm) == "gdpo" else {})}
    minimal = {
        "model": {"path": "model"},
        "data": {"train": "prompts.parquet"},
        "rollout": {"n": 8},
        # these add no stages
        "algorithm": {"loss": "gpg", "advantage": "grpo"},
    }
    environment = {"name": "calculator", "on_error": "fail"}
    talks: dict[str, object] = {"rollout.environment": environment} if "turns" in algorithm.needs else {}  # type: ignore[attr-defined]
    if not getattr(algorithm, "learns_from_reward", True):
        talks |= {"algorithm.distillation": {}, "teacher": {"path": "teacher"}}
    if key == "algorithm.experts":
        talks |= {"data.replay": {"files": ["answers.parquet"]}}
    config = parse_config(minimal, "reference").with_values({key: options, **talks})
    stages = ", ".join(f"`{stage}`" for stage in names_of(config) if stage not in ALWAYS)
    papers = ", ".join(
        f"[{paper}](https://arxiv.org/abs/{paper})"
        for paper in re.findall(r"arXiv (\d+\.\d+)", algorithm.__doc__ or "")
    )
    return f"| `{_tag(algorithm)}` | {needs or 'nothing'} | {stages or 'none'} | {papers} |\n"


def markdown(described: Callable[..., object]) -> str:
    """Returns a docstring as Markdown, with formulas in dollar signs, without the section of arguments."""
    text = (inspect.getdoc(described) or "").split("\n\nArgs:\n")[0]
    text = re.sub(r"\.\. math::[ ]*\n?((?:[ ]*\S.*\n?)+)", _formula, text)
    text = re.sub(r":math:`([^`]+)`", lambda match: f"${_macros(match[1])}$", text)
    return text.replace("``", "`")


def _formula(match: re.Match[str]) -> str:
    lines = inspect.cleandoc(match[1].rstrip())
    if "&" in lines and "cases" not in lines:
        lines = f"\\begin{{aligned}}\n{lines}\n\\end{{aligned}}"
    return f"$$\n{_macros(lines)}\n$$\n"


def _macros(formula: str) -> str:
    return formula.replace("\\operatorname", "\\mathrm")


METRICS_HEAD = """# Metrics

Generated from `rlhf/metrics.py` and `flows/shown_metrics.py` by `make docs`. A metric that verl also has is named as in verl
([decision 030](decisions/030-metric-names.md)). Each iteration writes one file with one row, in
`metrics/iteration=<k>.*.parquet`, and **every file has all columns of this table**, so pandas, DuckDB and polars read the
folder as one table:

```python
import duckdb, pandas as pd, polars as pl

pd.read_parquet("runs/countdown/metrics")
duckdb.sql("select * from read_parquet('runs/countdown/metrics/*.parquet') order by iteration")
pl.read_parquet("runs/countdown/metrics")
```

`iteration` is an int64, and everything else a float64 that is null if the iteration did not compute it: if its stage did
not run (a rescored run trains nothing, and `train.on_nan: skip` leaves updates out), or if there is nothing of what the
column "needs" names. `run.metrics()` gives the same rows without the columns that are null throughout, and includes
the iterations that a fork shares.

A validation adds `val-core/<data source>/reward/mean@<n>`, the mean score;
`val-core/<data source>/acc/mean@<n>`, the share of solved answers ([rewards.md](rewards.md)); and with `validation.n` above
1, `reward/maj@<n>` and `reward/best@<n>`. `val-aux/<data source>/reward/stderr@<n>` and `acc/stderr@<n>` are the standard
errors of the two means over the prompts. All are null in iterations without a validation. Their names depend on
`validation.data` and `validation.n`: if you change one, older files keep the columns that they have.

"Shown" says where a metric is shown: in the line of an iteration, in `ratchet status`, on the iteration's page in Prefect,
or as a curve of `ratchet ui` and `ratchet report`. `ratchet query RUN "select * from metrics"` prints all.

| metric | meaning | unit | stage | needs | shown |
|---|---|---|---|---|---|
"""

STAGES_HEAD = """
## Your own

| your | reports | as |
|---|---|---|
| reward, or an agent's program | named parts beside the score, in the dict that it returns ([rewards.md](rewards.md), [agents.md](agents.md)) | `reward/<part>/mean` |
| environment | `Observation(…, parts={"found": 1})`, summed over a trajectory ([rewards.md](rewards.md#your-own-environment)) | `reward/found/mean` |
| advantage | a dict of numbers after advantages and returns ([algorithms.md](algorithms.md#your-own)) | `advantages/<name>` |
| loss | a dict of tensors after the losses, averaged over the tokens ([algorithms.md](algorithms.md#your-own)) | `actor/<name>` |
| stage | what its function `metrics` returns ([CONTRIBUTING.md](../CONTRIBUTING.md#a-stage)) | the same names |

They are in the iteration's metrics file if the iteration reports them (not in every file, so DuckDB needs
`union_by_name = true` for those that come and go), in `run.metrics()` and `ratchet query`, in trackers, and curves of
`ratchet ui` and `ratchet report`.

## Names of stages

A stage has its name in the store, in tables of `ratchet query` and in messages; a short one in `ratchet status`
and `ratchet ui`, where room is scarce; and verl's in `timing_s/`. `ratchet fork --at K:STAGE` takes any of them.

| stage | short name | seconds that it computed |
|---|---|---|
"""


def metrics() -> str:
    shown = {display.name: display.shown for display in CATALOGUE}
    rows = []
    for metric in METRICS:
        places = ", ".join(str(place.name).lower() for place in shown.get(metric.name, ()))
        cells = (f"`{metric.name}`", metric.meaning, metric.unit, f"`{metric.stage}`", metric.only, places)
        rows.append(f"| {' | '.join(cells)} |\n")
    stages = [f"| `{stage.name}` | {stage.label} | `{timer(stage.name)}` |\n" for stage in STAGES]
    return METRICS_HEAD + "".join(rows) + STAGES_HEAD + "".join(stages)


COLUMNS_HEAD = """# Columns

Generated from `rlhf/schema.py` and the stages of `tasks/pipeline.py` by `make docs`. One row is one trajectory. Each stage
writes its own columns and `trajectory_id` to `trajectories/<stage>/iteration=<k>/*.parquet`; the column `iteration` comes
from the folder's name. [metrics.md](metrics.md) describes the metrics.

Shapes: `[T]` has an element for each token of the response, `[P]` for each token of the prompt, `[T k]` k elements for each
token of the response, one token after the other; a column without a shape is a single value. In `validate`, `iteration` is the one before which the validation ran. A stage that did not run has no
rows; `run.trajectories()` and `ratchet query` join the stages.

## Reading them

```python
import duckdb, pandas as pd, polars as pl
from datasets import load_dataset

pd.read_parquet("runs/countdown/trajectories/score")
duckdb.sql("from read_parquet('runs/countdown/trajectories/score/*/*.parquet', hive_types={'iteration': int})")
pl.read_parquet("runs/countdown/trajectories/score")
load_dataset("parquet", data_dir="runs/countdown/trajectories/score", split="train")  # of datasets
```

Spark reads the same folder with `spark.read.parquet`. Read a stage's folder, never `trajectories` as a whole: its stages have other columns. datasets, polars, DuckDB and Spark
refuse it, but pandas puts the rows of all stages below each other. `run.trajectories()` joins the stages, and
`ratchet push RUN REPO --trajectories` makes a joined dataset. Each file says in its metadata where it comes from, under
the key `ratchet`: `{"run": "countdown", "stage": "score", "iteration": 7, "schema_version": 1}`
(`pq.read_schema(file).metadata`, `pl.read_parquet_metadata(file)`, `from parquet_kv_metadata('*.parquet')` in DuckDB). In a
fork, `run` is the run that computed the rows. datasets makes no columns of the names of folders, so it has no `iteration`;
`trajectory_id` begins with it.

| | pandas | DuckDB | polars 2 | `run.trajectories()` |
|---|---|---|---|---|
| `iteration` | category of int32: `frame.iteration.astype(int)` | with `hive_types` as above INTEGER; else VARCHAR, such as `000007` | Int64 | int64 |
| int32, int64 | int32, int64 | INTEGER, BIGINT | Int32, Int64 | int32, int64 |
| float | float32 | FLOAT | Float32 | float32 |
| string | str | VARCHAR | String | str |
| bool | bool | BOOLEAN | Boolean | bool |
| `messages`, `extra_info`: JSON in a string | `frame.messages.map(json.loads)` | `messages->>'$[0].content'` | `pl.col("messages").str.json_path_match("$[0].content")` | as pandas |
| list, `[T]` | NumPy array | `INTEGER[]`, `FLOAT[]`, `TINYINT[]` | List | NumPy array |
| `turns` | array of dicts | `STRUCT("role" VARCHAR, "content" VARCHAR)[]` | List(Struct) | array of dicts |
| `reward_parts`, `agent_parts` | array of dicts: `{part["name"]: part["value"] for part in row}` | `map_from_entries(reward_parts)['length']`; in `ratchet query` `reward_parts['length']` | `pl.col("reward_parts").list.eval(pl.element().struct.field("value").filter(pl.element().struct.field("name") == "length")).list.first()` | dict |

A fork shares the files of its parent: its folder has only the rows that it computed itself. This reads all of them:

```python
from ratchet import open_run

open_run("file://./runs/other").trajectories()
```

"""


def columns() -> str:
    parts = [COLUMNS_HEAD]
    for stage in STAGES:
        if not isinstance(stage, RowsStage):
            continue
        parts.append(
            f"## `{stage.name}`\n\n| column | type | shape | unit | null if | meaning |\n|---|---|---|---|---|---|\n"
        )
        for column in (TRAJECTORY["trajectory_id"], *stage.writes):
            cells = (
                f"`{column.name}`",
                _type(column.type),
                _shape(column),
                column.unit,
                column.null or "never",
                column.meaning,
            )
            parts.append(f"| {' | '.join(cells)} |\n")
        parts.append("\n")
    parts.append(
        "## `served`\n\nThe answers of `ratchet serve` ([agents.md](agents.md#serving-a-policy)), a row each.\n\n"
    )
    parts += _plain_table(CALL_COLUMNS)
    parts.append(
        "\n## `canaries`\n\nThe checks that the rollout has the actor's weights "
        "([rollouts.md](rollouts.md#did-they-arrive)), a row for each text and engine.\n\n"
    )
    parts += _plain_table(CANARY_COLUMNS)
    return "".join(parts).rstrip() + "\n"


def _plain_table(columns: Mapping[str, tuple[pa.DataType, str]]) -> list[str]:
    rows = [f"| `{name}` | {_type(kind)} | {meaning} |\n" for name, (kind, meaning) in columns.items()]
    return ["| column | type | meaning |\n|---|---|---|\n", *rows]


MODELS_HEAD = """# Models

Generated from `rlhf/models/families.py` by `make docs`: the families of decoders that `AutoModelForCausalLM` of transformers
{version} knows, by the `model_type` in their `config.json`. The tests build a tiny model of each, with random weights
and layers of all its kinds (`tests/contract/test_architectures.py`). No checkpoint of the hub is part of them.

What the table says:

- **policy**: the log-probs of `rollout.engine: hf`, of the trainer and of a plain forward pass are equal; an update moves
  the weights; a checkpoint continues bit by bit, and transformers loads it with the same log-probs.
- **critic, reward model**: Ratchet puts a head on the decoder, where transformers has no token classifier of it; a model
  that is saved scores the same when it is loaded. Classes "of transformers" are used as they are, and not in this test.
- **LoRA**: adapters learn in all linear layers but the head, experts, layers that share their weights, and those whose
  weights a kernel or a router reads itself; merged, they are a plain model with the same log-probs.
- **state**: some layers carry a state from token to token. Such models are not packed, do not share prompts in training,
  and are refused with `sequence_parallel` ([rollouts.md](rollouts.md#architectures)).
- **vLLM**: vLLM {vllm} on the CPU loads the model and then the trainer's new weights, and generates with the trainer's
  log-probs (within {close}). An empty cell says nothing: vLLM may know the family, but it is not tested.

A run tries a small model of its own architecture before it starts. So a family that is not in this table is refused, too,
if it would generate or train wrongly.

| family | policy | critic, reward model | LoRA | state | vLLM |
|---|---|---|---|---|---|
"""

MODELS_VISION = """
## Images

| family | of transformers |
|---|---|
{rows}
Vision-language models read images and text ([rewards.md](rewards.md#images)). They generate with `rollout.engine: hf`,
most of them also with [vLLM and its servers](images.md#rollout-engines), and train with `torch` and `fsdp`, as policy,
critic, reference and teacher, with adapters on the decoder. All else is refused by name: other engines,
`sequence_parallel`, `tensor_parallel` of a trainer, `kernels`, `rollout.router_replay`, agents. So are other families with
images. `tests/contract/test_vision.py` checks, with tiny models:

- Prompts have the tokens of the family's own processor, one for each patch. Lengths, budgets and packing count them, and
  `data.truncation` never cuts a prompt with images. The processor computes with Pillow, for which
  transformers 5.16 also asks for torchvision, and later versions do not; SmolVLM's needs the package num2words.
- The log-probs of the rollout, of the trainer (padded, packed, and with shared prompts) and of transformers' model are
  equal, with each family's positions of images. Another picture changes them.
- The vision tower with its projector keeps its weights, unless `model.freeze_vision` is false.
- A policy may draw the token that stands for a patch. There is no image for it: the model reads the end-of-sequence token
  instead, in the rollout and in training.

The pictures are in the run's folder once, by their sha256, which the column `images` has.
"""

MODELS_REFUSED = """
## Refused

| the message says | because |
|---|---|
| cannot be trained | its hidden states cannot be computed without its logits |
| log-probs would be wrong | it changes hidden states or logits in a way that its decoder's head does not show |
| cannot generate | its cache is of another kind, or changes its log-probs; `rollout.engine: vllm` may generate with it |

## Not tested

"""


def models() -> str:
    parts = [
        MODELS_HEAD.format(version=transformers.__version__, vllm=families.VLLM_VERSION, close=families.VLLM_CLOSE)
    ]
    for kind in families.text_decoders():
        is_refused = kind in families.REFUSED
        classifier = "yes, of transformers" if families.has_own_classifier(kind) else "yes"
        cells = (
            f"`{kind}`",
            f"refused: {families.REFUSED[kind]}" if is_refused else "yes",
            "" if is_refused else f"no: {families.NO_CRITIC[kind]}" if kind in families.NO_CRITIC else classifier,
            "" if is_refused else "yes",
            "some layers" if kind in families.STATEFUL else "",
            "yes" if kind in families.VLLM else "",
        )
        parts.append(f"| {' | '.join(cells)} |\n")
    names = "".join(f"| `{kind}` | {MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]} |\n" for kind in families.VISION)
    parts.append(MODELS_VISION.format(rows=names))
    parts.append(MODELS_REFUSED)
    parts += [f"- `{kind}`: {reason}\n" for kind, reason in families.UNBUILT.items()]
    for what, kinds in families.NO_TEXT_DECODERS.items():
        parts.append(f"- {', '.join(f'`{kind}`' for kind in kinds)}: they {what}\n")
    return "".join(parts)


def _type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list of {_type(kind.value_type)}"
    if pa.types.is_struct(kind):
        return f"struct of {', '.join(field.name for field in kind)}"
    return str(kind)


def _shape(column: Column) -> str:
    if not pa.types.is_list(column.type):
        return ""
    of_policy = dict.fromkeys(
        (
            "turn_starts",
            "turn_ends",
            "turn_rewards",
            "turn_states",
            "turn_seconds",
            "turn_values",
            "continuation_returns",
        ),
        "[policy turns]",
    )
    of_teacher = dict.fromkeys(("teacher_topk_ids", "teacher_topk_log_probs"), "[T k]")
    others = {"prompt_ids": "[P]", "turns": "[turns]", "continuations": "[continuations]"}
    return {**others, **of_policy, **of_teacher}.get(column.name, "[T]")


def main() -> None:
    pages = {
        "configuration": configuration,
        "migration": migration,
        "algorithms": algorithms,
        "metrics": metrics,
        "columns": columns,
        "models": models,
    }
    for name, text in ((name, page()) for name, page in pages.items()):
        target = DOCS / f"{name}.md"
        if "--check" not in sys.argv:
            target.write_text(text)
        elif not target.exists() or target.read_text() != text:
            sys.exit(f"docs/{name}.md is out of date: run `make docs`")


if __name__ == "__main__":
    main()
