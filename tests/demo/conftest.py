"""A tiny chat model that the demo hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from engine.hooks import at_rest
from families import build_tiny
from quiet import small_and_quiet
from tiny_chat import chat_tokenizer

from hfpaged.demo.host import Host


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    with small_and_quiet():
        yield


@pytest.fixture(scope="module")
def shared_host() -> Host:
    return Host(build_tiny("llama"), chat_tokenizer(), "tiny", max_requests=8, num_blocks=96)


@pytest.fixture
def host(shared_host: Host) -> Iterator[Host]:
    """A host whose engine holds nothing before and after the test."""
    yield shared_host
    assert at_rest(shared_host.engine)


@pytest.fixture
def stock_answer(shared_host: Host) -> Callable[..., str]:
    """`stock_answer(question, new_tokens)`: the text that stock greedy generate() gives a first question."""

    def answer(question: str, new_tokens: int) -> str:
        from hfpaged.demo import stock_run

        prompt = shared_host.chat_prompt([{"role": "user", "content": question}], new_tokens).ids
        tokens = stock_run.alone(shared_host.stock_twin(), prompt, new_tokens)
        return shared_host.tokenizer.decode(tokens, skip_special_tokens=True)

    return answer
