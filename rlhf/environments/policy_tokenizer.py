"""Loads the policy's tokenizer, whose chat template describes the environment's tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratchet.rlhf.data.chat_turns import treat_special_tokens
from ratchet.rlhf.environments.environment import load_environment
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ratchet.rlhf.config.sections import EnvironmentConfig, ModelConfig, SpecialTokens


def tools_of_environment(environment: EnvironmentConfig | None) -> list[dict[str, Any]]:
    """Returns the schemas of an environment's tools, by its class method `schemas`; none if it has no such method."""
    if environment is None:
        return []
    schemas_of = getattr(load_environment(environment.name), "schemas", None)
    return [] if schemas_of is None else [dict(schema) for schema in schemas_of(**environment.options)]


def policy_tokenizer(
    model: ModelConfig, environment: EnvironmentConfig | None, special_tokens: SpecialTokens = "split"
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of the policy.

    Args:
        environment: `rollout.environment`; the chat template gets its tools.
    """
    tokenizer = load_tokenizer(model)
    treat_special_tokens(tokenizer, special_tokens)
    schemas = tools_of_environment(environment)
    if environment is None or not schemas:
        return tokenizer
    templates = tokenizer.chat_template
    template = templates.get("tool_use", templates.get("default")) if isinstance(templates, dict) else templates
    if not template or "tools" not in template:
        raise UserError(
            f"rollout.environment {environment.name} has tools, but the chat template of {model.path} does not "
            "describe tools: set model.chat_template, or choose a model that was trained to call tools"
        )
    tokenizer.chat_template = f"{{%- set tools = {schemas!r} -%}}{template}"  # Jinja understands Python's literals
    return tokenizer
