"""From a tokenizer and a running engine to what the server needs."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from hfpaged.errors import ConfigError
from hfpaged.serving.api.limits import ServerLimits
from hfpaged.serving.api.server_state import ServerState
from hfpaged.serving.chat.template import ChatTemplate
from hfpaged.serving.chat.tool_parser import TOOL_FORMATS, ToolFormat, format_of_template
from hfpaged.serving.process.client import EngineClient


def make_state(
    name: str,
    client: EngineClient,
    tokenizer: PreTrainedTokenizerBase,
    tool_format: str | None = None,
    limits: ServerLimits | None = None,
) -> ServerState:
    """The state of a server.

    Args:
        name: of the model, for clients.
        tool_format: a key of TOOL_FORMATS, or "none"; None: what the chat template looks like.

    Raises:
        ConfigError: no such tool format.
    """
    limits = limits or ServerLimits()
    template = _template(tokenizer, limits.template_seconds)
    format = _tool_format(tool_format, template)
    return ServerState(name, client, tokenizer, template, format, limits)


def _template(tokenizer: PreTrainedTokenizerBase, seconds: float) -> ChatTemplate | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        return None
    tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return ChatTemplate(template, tokens, seconds)


def _tool_format(name: str | None, template: ChatTemplate | None) -> ToolFormat | None:
    if name == "none" or template is None:
        return None
    if name is None:
        return format_of_template(template.source)
    if name not in TOOL_FORMATS:
        raise ConfigError(f"tool format must be one of {', '.join(TOOL_FORMATS)} or none, got {name!r}")
    return TOOL_FORMATS[name]
