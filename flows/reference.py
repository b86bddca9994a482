"""Generate the reference pages in `docs/`: `python -m flows.reference [--check]`."""

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

from flows.metrics import CATALOGUE
from rlhf.algorithms.advantages import Advantage
from rlhf.algorithms.kl import AdaptiveCoefficient, kl_divergence
from rlhf.algorithms.masked import aggregate
from rlhf.algorithms.policy_losses import PolicyLoss
from rlhf.algorithms.reward_shaping import OverlongPenalty
from rlhf.algorithms.rollout_correction import ImportanceWeights, Rejection, off_policy_metrics
from rlhf.config import DynamicSamplingConfig, RewardTraining, RunConfig, SFTConfig, keys, models_in, parse_config
from rlhf.config.counterparts import SOURCES, Counterpart, Source
from tasks.pipeline import names_of

DOCS = Path(__file__).resolve().parent.parent / "docs"

HEAD = """# Configuration

Generated from the models in `rlhf/config/` by `make docs`; `ratchet train --help` prints the same keys. Set a key
in the YAML file (as nested sections) or on the command line (`a.b=c`). Unknown keys are errors. Where a `type` selects
an algorithm, the keys of each choice follow in brackets. [migration.md](migration.md) lists the counterparts of the
settings of verl, TRL and OpenRLHF.

"""

MIGRATION = """# Coming from verl, TRL or OpenRLHF

Generated from the tables in `rlhf/config/counterparts/` by `make docs`. `ratchet convert` writes a config by these
tables, and errors about unknown keys quote them:

```console
$ ratchet convert run_qwen3_8b_fsdp.sh -o run.yaml
run.yaml: 33 keys; 10 settings have no equal (see the comments at its end)
$ ratchet convert trl.yaml --from trl --num_processes 8 -o run.yaml
$ ratchet convert train_ppo_ray.sh --from openrlhf -o run.yaml
```

It takes a YAML file, or a shell script that starts the program; a script is read, not run. Variables that the script
does not set have the values of this shell, and further settings may follow the file, as on the program's command line.
Every line of the config says which setting it comes from. Defaults of the program that differ from ours are written
out. Comments say what was assumed, and which settings have no equal. The number of iterations is computed from epochs
if the data files can be read.

Sizes are converted to these units: `data.prompts_per_iteration` counts prompts, `actor.mini_batch_trajectories`
trajectories, and `actor.micro_batch_tokens` tokens; all but the last are totals over all processes.
"""


ALGORITHMS = """# Algorithms

Generated from `rlhf/algorithms/` by `make docs`. Every algorithm is a class whose fields are its configuration. Its
`needs` decide which stages an iteration runs in addition to `generate`, `score`, `advantages`, `update_actor` and
`close`. Recipes are in `examples/`. The formulas are checked against recorded values of the published implementations
(`tests/unit/test_oracles.py`).

Notation: $r_t$ reward of a token, $R$ sum of a trajectory's rewards, $A$ advantage, $\\rho$ ratio of the policy to the
old one, $\\pi$ probability of a token.

"""

REWARD = "ratchet reward-model"
ALWAYS = ("generate", "score", "advantages", "update_actor")
NAMES = {
    "group_ids": "groups (rollout.n > 1)",
    "greedy_scores": "greedy answers",
    "reward_parts": "parts of the reward",
}


def configuration() -> str:
    fits = "".join(
        f"\n## `{command}`\n\n{table(model)}"
        for command, model in (("ratchet sft", SFTConfig), (REWARD, RewardTraining))
    )
    return HEAD + table(RunConfig) + fits


def migration() -> str:
    """A table for each program that configs can be converted from."""
    parts = [MIGRATION]
    for source in SOURCES:
        parts.append(f"\n## {source.name}\n\n| {source.name} | here | note |\n|---|---|---|\n")
        parts += [_counterpart(source, row) for row in source.counterparts if row.theirs]
    return "".join(parts)


def _counterpart(source: Source, row: Counterpart) -> str:
    names = []
    for key in row.theirs:
        older = ", ".join(f"`{name}`" for name in source.older_names(key))
        names.append(f"`{key}` (older: {older})" if older else f"`{key}`")
    return f"| {', '.join(names)} | {', '.join(f'`{key}`' for key in row.ours) or '–'} | {row.note} |\n"


def table(model: type[BaseModel]) -> str:
    """A table of all keys of a config."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, kind, default, meaning in keys(model):
        lines.append(f"| `{key}` | {kind} | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def algorithms() -> str:
    """A table of each kind of algorithm, followed by their equations."""
    parts = [ALGORITHMS]
    for title, key, union in (
        ("Advantages", "algorithm.advantage", Advantage),
        ("Policy losses", "algorithm.loss", PolicyLoss),
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
        "algorithm": {"loss": "gpg", "advantage": "grpo"},
    }
    config = parse_config(minimal, "reference").with_values({key: options})
    stages = ", ".join(f"`{stage}`" for stage in names_of(config) if stage not in ALWAYS)
    papers = ", ".join(
        f"[{paper}](https://arxiv.org/abs/{paper})"
        for paper in re.findall(r"arXiv (\d+\.\d+)", algorithm.__doc__ or "")
    )
    return f"| `{_tag(algorithm)}` | {needs or 'nothing'} | {stages or 'none'} | {papers} |\n"


def markdown(described: Callable[..., object]) -> str:
    """A docstring as Markdown, with its formulas in dollar signs."""
    text = inspect.getdoc(described) or ""
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


METRICS = """# Metrics

Generated from `flows/metrics.py` by `make docs`. These are the main metrics, and where each is shown: in the line that
an iteration prints, in `ratchet status`, on the iteration's page in Prefect, or as a curve of `ratchet report`. An
iteration stores every metric that its stages report; `ratchet query RUN "select * from metrics"` prints them all.

| metric | meaning | unit | shown |
|---|---|---|---|
"""


def metrics() -> str:
    rows = []
    for metric in CATALOGUE:
        places = ", ".join(place.name.lower() for place in metric.shown if place.name is not None)
        rows.append(f"| `{metric.name}` | {metric.title} | {metric.unit} | {places} |\n")
    return METRICS + "".join(rows)


def main() -> None:
    for name, text in (
        ("configuration", configuration()),
        ("migration", migration()),
        ("algorithms", algorithms()),
        ("metrics", metrics()),
    ):
        target = DOCS / f"{name}.md"
        if "--check" not in sys.argv:
            target.write_text(text)
        elif not target.exists() or target.read_text() != text:
            sys.exit(f"docs/{name}.md is out of date: run `make docs`")


if __name__ == "__main__":
    main()
