"""Thoughts and tool calls in a text that arrives in pieces."""

from __future__ import annotations

import pytest

from hfpaged.demo.transcript import ANSWER, THOUGHT, TOOL_CALL, Step, parse

TEXT = "<think>Is it 4?</think>Let me see.<tool_call>{}</tool_call>\nIt is 4, and 1 < 2."


def test_a_text_is_taken_apart_at_its_tags():
    assert parse(TEXT, ended=True) == [
        Step(THOUGHT, "Is it 4?", True),
        Step(ANSWER, "Let me see.", True),
        Step(TOOL_CALL, "{}", True),
        Step(ANSWER, "\nIt is 4, and 1 < 2.", True),
    ]


@pytest.mark.parametrize("end", range(len(TEXT)))
def test_no_piece_of_a_tag_is_ever_shown(end):
    seen = parse(TEXT[:end])
    whole = parse(TEXT, ended=True)
    shown = [step.text for step in seen]
    assert [full.text[: len(text)] for full, text in zip(whole, shown, strict=False)] == shown
    assert all(step.done for step in seen[:-1])


def test_a_thought_that_the_template_opened_is_one():
    assert parse("Hm.</think>Yes.", in_thought=True, ended=True) == [
        Step(THOUGHT, "Hm.", True),
        Step(ANSWER, "Yes.", True),
    ]
    assert parse("Hm.", in_thought=True) == [Step(THOUGHT, "Hm.", False)]


def test_an_unfinished_thought_ends_with_the_text():
    assert parse("<think>and so <", ended=True) == [Step(THOUGHT, "and so <", True)]


def test_nothing_but_space_is_no_step():
    assert parse("<think>\n\n</think>\n\nHello", ended=True) == [Step(ANSWER, "\n\nHello", True)]
