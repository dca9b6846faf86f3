"""What a model has written, taken apart into thoughts, tool calls and the answer proper, while it is still growing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

ANSWER, THOUGHT, TOOL_CALL, TOOL_RESULT = "answer", "thought", "tool call", "tool result"
_OPENING = {"<think>": THOUGHT, "<tool_call>": TOOL_CALL}
_CLOSING = {THOUGHT: "</think>", TOOL_CALL: "</tool_call>"}


class Step(NamedTuple):
    """A part of an answer.

    Attributes:
        kind: ANSWER, THOUGHT, TOOL_CALL or TOOL_RESULT.
        done: whether its end has been seen.
    """

    kind: str
    text: str
    done: bool


def parse(text: str, in_thought: bool = False, ended: bool = False) -> list[Step]:
    """Take a text apart at `<think>` and `<tool_call>` tags, as Qwen, DeepSeek, Hermes and SmolLM write them.

    Args:
        in_thought: the text begins inside a thought.
        ended: nothing will be added to the text. Before that, what may become a tag at its end is kept back.
    """
    steps: list[Step] = []
    kind = THOUGHT if in_thought else ANSWER
    while True:
        tags = list(_OPENING) if kind == ANSWER else [_CLOSING[kind]]
        at, tag = _find_first(text, tags)
        if tag is None:
            rest = text if ended else _without_partial_tag(text, tags)
            steps.append(Step(kind, rest, done=ended))
            return [step for step in steps if step.text.strip()]
        steps.append(Step(kind, text[:at], done=True))
        text = text[at + len(tag) :]
        kind = _OPENING.get(tag, ANSWER)


def _find_first(text: str, tags: Iterable[str]) -> tuple[int, str | None]:
    found = [(text.find(tag), tag) for tag in tags if tag in text]
    return min(found) if found else (-1, None)


def _without_partial_tag(text: str, tags: Iterable[str]) -> str:
    start = text.rfind("<")
    if start >= 0 and any(tag.startswith(text[start:]) for tag in tags):
        return text[:start]
    return text
