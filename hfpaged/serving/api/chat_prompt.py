"""From the messages of a request to the token ids of a prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hfpaged.serving.api.errors import ApiError, unsupported
from hfpaged.serving.api.schemas import ChatBody, Message, Tool
from hfpaged.serving.api.server_state import ServerState

# Templates know this role by its older name.
_ROLES = {"developer": "system"}


async def chat_prompt(
    state: ServerState, messages: Sequence[Message], tools: Sequence[Tool] | None, body: ChatBody | None = None
) -> list[int]:
    """Token ids of a conversation as the model's template writes it.

    Raises:
        ApiError, InputError: the model has no template, or it does not take this conversation.
    """
    if state.template is None:
        raise ApiError(400, "this model has no chat template; use /v1/completions", code="no_chat_template")
    if tools and (state.tool_format is None or not state.template.mentions_tools):
        raise unsupported("tools", "this model's chat template has no tools, or none in a format known here")
    text = await state.template.render(
        [template_message(message, place) for place, message in enumerate(messages)],
        [_template_tool(tool) for tool in tools] if tools else None,
        (body.chat_template_kwargs if body is not None else None) or {},
    )
    return await state.encode(text, False, "messages")


def wants_tools(body: ChatBody) -> bool:
    """Whether the model may call tools."""
    return bool(body.tools) and body.tool_choice != "none"


def template_message(message: Message, place: int) -> dict[str, Any]:
    """A message as templates expect it: content is text, and arguments of calls are objects."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None and not message.tool_calls:
        raise ApiError(400, f"messages.{place} has no content", param=f"messages.{place}.content")
    made: dict[str, Any] = {"role": _ROLES.get(message.role, message.role), "content": content or ""}
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, place)},
            }
            for call in message.tool_calls
        ]
    return made


def _template_tool(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}


def _arguments(text: str, place: int) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        param = f"messages.{place}.tool_calls"
        raise ApiError(400, "the arguments of a tool call must be a JSON object", param=param)
    return arguments
