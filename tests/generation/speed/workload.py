"""What the tests of generation's speed run, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

TOPICS = (
    "the sea", "a small dog", "winter in Oslo", "old trains", "bread", "the moon", "chess", "a lost key",
    "rivers", "music", "a red door", "bees", "paper", "the desert", "clocks", "rain",
)  # fmt: skip
TEXT = (
    "The old lighthouse keeper climbed the narrow stairs every evening. He lit the lamp, checked the lens for dust, "
    "and wrote the weather into a thick blue book. Ships passed far out on the grey water, and sometimes one of them "
    "answered with three short blasts of its horn. In winter the stairs were cold and the wind sang in the railing, "
    "but he never missed a night. When he grew tired he read old letters from his sister, who lived in a city."
)
GREEDY = {"do_sample": False, "eos_token_id": None}


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def best_of_turns(calls: list[Callable[[], Any]], turns: int = 3) -> list[float]:
    """The least seconds of each call, in turn, so that what disturbs the machine disturbs all."""
    times = [[seconds(call) for call in calls] for _ in range(turns)]
    return [min(each) for each in zip(*times, strict=True)]


def batch_of(tokenizer: Any, prompts: list[str]) -> Any:
    """Left-padded ids and mask."""
    return tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")


def chat_prompt(tokenizer: Any, request: str) -> str:
    chat = [{"role": "user", "content": request}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
