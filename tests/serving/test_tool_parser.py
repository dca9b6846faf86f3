from __future__ import annotations

import pytest

from hfpaged.serving.chat.tool_parser import HERMES, LLAMA, MISTRAL, Parsed, ToolCall, ToolFormat, ToolParser

ADD = ToolCall("add", '{"a": 1}')
SUB = ToolCall("sub", '{"b": [2]}')

CASES = [
    (HERMES, "plain", "plain", []),
    (HERMES, 'ok <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "ok ", [ADD]),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        '<tool_call>{"name": "sub", "arguments": {"b": [2]}}</tool_call>',
        "",
        [ADD, SUB],
    ),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}}', "", [ADD]),
    (HERMES, "a <tool_call>not json</tool_call> b", "a <tool_call>not json</tool_call> b", []),
    (HERMES, "a < b <tool", "a < b <tool", []),
    (HERMES, "<tool_call>" + "[" * 5000, "<tool_call>" + "[" * 5000, []),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}; {"name": "sub", "parameters": {"b": [2]}}', "", [ADD, SUB]),
    (LLAMA, '{"not": "a call"}', '{"not": "a call"}', []),
    (LLAMA, 'see {"name": "add", "parameters": {}}', 'see {"name": "add", "parameters": {}}', []),
    (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', "", [ADD]),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sub[ARGS]{"b": [2]}', "", [ADD, SUB]),
    (MISTRAL, "[1] a list", "[1] a list", []),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES)
@pytest.mark.parametrize("size", [1, 3, 100_000])
def test_text_is_split_alike_however_it_arrives(
    format: ToolFormat, text: str, content: str, calls: list[ToolCall], size: int
) -> None:
    parser, whole = ToolParser(format), Parsed()
    parts = [parser.push(text[first : first + size]) for first in range(0, len(text), size)]
    for part in [*parts, parser.finish()]:
        whole.content += part.content
        whole.calls += part.calls
    assert (whole.content, whole.calls) == (content, calls)


def test_a_call_without_an_end_is_given_up_at_a_bounded_length() -> None:
    parser = ToolParser(HERMES)
    text = "<tool_call>" + "x" * (1 << 21)
    assert parser.push(text).content == text
