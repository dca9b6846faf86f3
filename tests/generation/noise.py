"""Other users of the same model, who generate all sorts of things while a test does its own."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

from batches import Prompt, left_padded, new_tokens, random_prompts
from generation.fakes import WAIT_SECONDS, ObservingProcessor
from transformers import PreTrainedModel

PROMPTS = random_prompts((2, 7, 18, 33, 12), seed=9)
MOST_TOKENS = 12
# Options, and whether they leave the text as it is without them.
KINDS: list[tuple[dict[str, Any], bool]] = [
    ({"do_sample": False}, True),
    ({"do_sample": True}, False),
    ({"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}, False),
    ({"do_sample": False, "logits_processor": [ObservingProcessor()]}, True),
]


def texts(model: PreTrainedModel, prompts: list[Prompt], count: int, **options: Any) -> list[list[int]]:
    out = model.generate(**left_padded(prompts), max_new_tokens=count, eos_token_id=-1, pad_token_id=0, **options)
    return new_tokens(out, prompts)


def be_a_user(model: PreTrainedModel, choose: random.Random, greedy: list[list[int]]) -> None:
    """One call of some kind, whose text must be its own."""
    numbers = choose.sample(range(len(PROMPTS)), choose.randint(1, 3))
    count = choose.randint(1, MOST_TOKENS)
    options, is_greedy = choose.choice(KINDS)
    got = texts(model, [PROMPTS[number] for number in numbers], count, **options)
    if is_greedy and got != [greedy[number][:count] for number in numbers]:
        raise AssertionError(f"prompts {numbers} with {options} got {got}")


@contextlib.contextmanager
def noise(model: PreTrainedModel, num_threads: int = 4) -> Iterator[None]:
    """That many threads which call `generate` again and again until the end of the block."""
    stop = threading.Event()
    failures = []
    greedy = texts(model, PROMPTS, MOST_TOKENS, do_sample=False)

    def user(index: int) -> None:
        choose = random.Random(index)
        try:
            while not stop.is_set():
                be_a_user(model, choose, greedy)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=user, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(WAIT_SECONDS)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
