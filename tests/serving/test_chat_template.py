"""Chat templates are code from a model's directory: they get a process, a deadline and a limit of memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from hfpaged.errors import InputError, UnsupportedOptionError
from hfpaged.serving.chat.template import ChatTemplate

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def made() -> Iterator[list[ChatTemplate]]:
    templates: list[ChatTemplate] = []
    yield templates
    for template in templates:
        template.close()


def render(made: list[ChatTemplate], source: str, variables: dict | None = None) -> str:
    made.append(ChatTemplate(source, {"bos_token": "<s>"}, seconds=1.0))
    return asyncio.run(made[-1].render(HI, None, variables or {}))


def test_it_sees_messages_special_tokens_and_variables(made: list[ChatTemplate]) -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ mood }}{{ tools }}"
    assert render(made, source, {"mood": "!"}) == "<s>hi!None"
    with pytest.raises(UnsupportedOptionError, match="bos_token"):
        asyncio.run(made[0].render(HI, None, {"bos_token": "x"}))


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * (2 ** 40) }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set ns = namespace(x='x') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__ }}",
        "{% broken",
    ],
)
def test_a_hostile_one_costs_its_own_request_only(made: list[ChatTemplate], source: str) -> None:
    # The worker's start is no part of the time.
    assert render(made, "{{ messages[0].content }}") == "hi"
    template = made[0]
    template.source, good = source, template.source
    began = time.monotonic()
    with pytest.raises(InputError, match="chat template"):
        asyncio.run(template.render(HI, None, {}))
    assert time.monotonic() - began < 10
    template.source = good
    assert asyncio.run(template.render(HI, None, {})) == "hi"
