"""The configuration: sections, whole runs, incompatible settings, and reading from YAML."""

from rlhf.config.fitting import FitConfig, RewardTraining, SFTConfig
from rlhf.config.reading import differences, keys, models_in, overridden, read_yaml, validated, yaml_text
from rlhf.config.run import RunConfig, load_config, parse_config, stored_config
from rlhf.config.sections import (
    ActorConfig,
    CheckpointConfig,
    DataConfig,
    DynamicSamplingConfig,
    EnvironmentConfig,
    LoRAConfig,
    LRScheduleConfig,
    ModelConfig,
    PoolConfig,
    ReferenceConfig,
    RewardConfig,
    RewardModelConfig,
    RunSection,
    Section,
    TrainerConfig,
)

__all__ = [
    "ActorConfig",
    "CheckpointConfig",
    "DataConfig",
    "DynamicSamplingConfig",
    "EnvironmentConfig",
    "FitConfig",
    "LRScheduleConfig",
    "LoRAConfig",
    "ModelConfig",
    "PoolConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RewardTraining",
    "RunConfig",
    "RunSection",
    "SFTConfig",
    "Section",
    "TrainerConfig",
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
