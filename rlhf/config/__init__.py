"""The configuration: its sections, a whole run, what does not go together, and how it is read."""

from rlhf.config.fitting import FitConfig, RewardTraining, SFTConfig
from rlhf.config.reading import differences, keys, models_in, overridden, read_yaml, validated, yaml_text
from rlhf.config.run import RunConfig, load_config, parse_config, stored_config
from rlhf.config.sections import (
    Actor,
    Checkpoint,
    Data,
    DynamicSampling,
    LoRA,
    LRSchedule,
    Model,
    Pool,
    Reference,
    Reward,
    RewardModel,
    Run,
    Section,
    Trainer,
)

__all__ = [
    "Actor",
    "Checkpoint",
    "Data",
    "DynamicSampling",
    "FitConfig",
    "LRSchedule",
    "LoRA",
    "Model",
    "Pool",
    "Reference",
    "Reward",
    "RewardModel",
    "RewardTraining",
    "Run",
    "RunConfig",
    "SFTConfig",
    "Section",
    "Trainer",
    "differences",
    "keys",
    "load_config",
    "models_in",
    "overridden",
    "parse_config",
    "read_yaml",
    "stored_config",
    "validated",
    "yaml_text",
]
