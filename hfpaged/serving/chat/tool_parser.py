"""Finds tool calls in generated text while it arrives, in the formats that models are trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Of text that is waited for in case it is a tool call.
LONGEST_CALL = 1 << 20


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for; `arguments` is JSON text, as in the OpenAI API."""

    name: str
    arguments: str


@dataclass
class Parsed:
    """Text that is content, and the calls that were completed."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    Attributes:
        start: what a call begins with; text before it is content.
        end: what it ends with; None: the end of the text.
        parse: the calls in what is between; None if it is something else, and then it is content.
        only_first: a call must be the first thing in the text.
    """

    name: str
    start: str
    end: str | None
    parse: Callable[[str], list[ToolCall] | None]
    only_first: bool = False


class ToolParser:
    """Splits one growing text into content and calls. What looks like a call and is none becomes content."""

    def __init__(self, format: ToolFormat):
        self._format = format
        self._pending = ""
        self._in_call = False
        self._seen_content = False

    def push(self, text: str) -> Parsed:
        """Append text; returns what is certain now."""
        self._pending += text
        parsed = Parsed()
        while self._advance(parsed):
            continue
        return parsed

    def finish(self) -> Parsed:
        """The rest of the text."""
        parsed = Parsed()
        rest, self._pending = self._pending, ""
        if self._in_call:
            self._take_call(rest, parsed, end="")
        else:
            parsed.content = rest
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        """Take one piece of the pending text. Returns whether there may be more to take."""
        return self._advance_in_call(parsed) if self._in_call else self._advance_in_content(parsed)

    def _advance_in_content(self, parsed: Parsed) -> bool:
        start = self._format.start
        may_start = not (self._format.only_first and self._seen_content)
        place = self._pending.find(start) if may_start else -1
        if self._format.only_first and self._pending[: max(place, 0)].strip():
            place = -1
        if place >= 0:
            self._give(self._pending[:place], parsed)
            self._pending = self._pending[place + len(start) :]
            self._in_call = True
            return True
        held = _length_of_partial(self._pending, start) if may_start else 0
        end = len(self._pending) - held
        if self._format.only_first and may_start and not self._pending[:end].strip():
            return False
        self._give(self._pending[:end], parsed)
        self._pending = self._pending[end:]
        return False

    def _advance_in_call(self, parsed: Parsed) -> bool:
        end = self._format.end
        place = self._pending.find(end) if end is not None else -1
        if place >= 0:
            body, self._pending = self._pending[:place], self._pending[place + len(end) :]
            self._take_call(body, parsed, end)
            return True
        if len(self._pending) > LONGEST_CALL:
            body, self._pending = self._pending, ""
            self._take_call(body, parsed, end="")
        return False

    def _take_call(self, body: str, parsed: Parsed, end: str) -> None:
        self._in_call = False
        calls = self._format.parse(body)
        if calls is None:
            self._give(self._format.start + body + end, parsed)
        else:
            parsed.calls += calls

    def _give(self, text: str, parsed: Parsed) -> None:
        self._seen_content = self._seen_content or bool(text.strip())
        parsed.content += text


def _length_of_partial(text: str, marker: str) -> int:
    """How many of the last characters of `text` may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def _call(value: Any) -> ToolCall | None:
    """A call from {"name": ..., "arguments": {...}} or the same with "parameters"."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return ToolCall(value["name"], arguments)
    return ToolCall(value["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None


def _calls(values: list[Any]) -> list[ToolCall] | None:
    calls = [_call(value) for value in values]
    return None if not calls or None in calls else calls


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _parse_hermes(body: str) -> list[ToolCall] | None:
    return _calls([_load(body)])


def _parse_llama(body: str) -> list[ToolCall] | None:
    # Several calls are separated by semicolons. The start marker was the first brace.
    parts = re.split(r"\}\s*;\s*\{", "{" + body.strip())
    last = len(parts) - 1
    return _calls([_load(("{" if i else "") + part + ("}" if i < last else "")) for i, part in enumerate(parts)])


def _parse_mistral(body: str) -> list[ToolCall] | None:
    body = body.strip()
    if body.startswith("["):
        loaded = _load(body)
        return _calls(loaded) if isinstance(loaded, list) else None
    # Newer: name[ARGS]{...}, or name{...}, each behind its own marker.
    calls = []
    for part in body.split("[TOOL_CALLS]"):
        match = re.fullmatch(r"([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?(\{.*\})", part.strip(), re.DOTALL)
        calls.append({"name": match[1], "arguments": _load(match[2])} if match else None)
    return _calls(calls)


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", _parse_hermes)
LLAMA = ToolFormat("llama3_json", "{", None, _parse_llama, only_first=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", None, _parse_mistral)
TOOL_FORMATS = {format.name: format for format in (HERMES, LLAMA, MISTRAL)}
# Only a model whose template says so knows a format.
_SIGNS = (("<tool_call>", HERMES), ("[TOOL_CALLS]", MISTRAL), ("ipython", LLAMA), ("<|python_tag|>", LLAMA))


def format_of_template(template: str) -> ToolFormat | None:
    """The format that a model's chat template teaches it, or None."""
    return next((format for sign, format in _SIGNS if sign in template), None)
