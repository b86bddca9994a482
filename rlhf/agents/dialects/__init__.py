"""The dialects that the endpoint speaks: OpenAI's chat, completions and responses, and Anthropic's messages."""

from ratchet.rlhf.agents.dialects.chat import ChatDialect
from ratchet.rlhf.agents.dialects.completions import CompletionsDialect
from ratchet.rlhf.agents.dialects.dialect import MODEL, Dialect, Exchange, Unsupported, check_model, openai_error
from ratchet.rlhf.agents.dialects.messages import MessagesDialect
from ratchet.rlhf.agents.dialects.responses import ResponsesDialect

__all__ = ["DIALECTS", "MESSAGES", "MODEL", "Dialect", "Exchange", "Unsupported", "check_model", "openai_error"]

MESSAGES = MessagesDialect()
DIALECTS: tuple[Dialect, ...] = (ChatDialect(), CompletionsDialect(), MESSAGES, ResponsesDialect())
