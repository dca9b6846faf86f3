"""Benchmark workloads: lists of prompts with the number of tokens to generate for each."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hfpaged.errors import InputError

Encode = Callable[[str], list[int]]

_VOCABULARY = (
    "the quick brown fox jumps over a lazy dog while many people in town watch and wonder about how machines learn "
    "from water stone paper light and the long quiet roads of winter"
).split()


class BenchRequest(NamedTuple):
    """Token ids of a prompt, and how many tokens to generate whatever they are."""

    prompt_token_ids: list[int]
    max_new_tokens: int


def read_workload(path: Path) -> list[BenchRequest]:
    """Read a JSON list of {"prompt_token_ids": [...], "max_new_tokens": n}.

    Raises:
        InputError: the file cannot be read or does not hold such a list.
    """
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the workload {path}: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{path} does not hold a list of requests")
    return [_request(row, f"{path}, request {index}") for index, row in enumerate(rows)]


def _request(row: object, where: str) -> BenchRequest:
    if not isinstance(row, dict):
        raise InputError(f"{where}: not an object")
    prompt, new_tokens = row.get("prompt_token_ids"), row.get("max_new_tokens")
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int and token >= 0 for token in prompt):
        raise InputError(f"{where}: prompt_token_ids must be a list of token ids")
    if type(new_tokens) is not int or new_tokens < 1:
        raise InputError(f"{where}: max_new_tokens must be a positive integer")
    return BenchRequest(prompt, new_tokens)


def make_workload(kind: str, encode: Encode, count: int, seed: int) -> list[BenchRequest]:
    """Make `count` requests of one of the KINDS; equal arguments give equal token ids."""
    return KINDS[kind](random.Random(seed), encode, count)


def _mixed(rng: random.Random, encode: Encode, count: int) -> list[BenchRequest]:
    """Prompts of 16 to 256 words, 8 to 128 new tokens: the everyday case."""
    return [
        BenchRequest(encode(_text(rng, rng.choice([16, 32, 64, 128, 256]))), rng.choice([8, 16, 32, 64, 128]))
        for _ in range(count)
    ]


def _decode(rng: random.Random, encode: Encode, count: int) -> list[BenchRequest]:
    """Prompts of 12 words, 128 new tokens: nearly all decoding."""
    return [BenchRequest(encode(_text(rng, 12)), 128) for _ in range(count)]


def _prefix(rng: random.Random, encode: Encode, count: int) -> list[BenchRequest]:
    """One document of 1,000 words, a question of 12 about it in each request, 32 new tokens."""
    document = _text(rng, 1000)
    return [BenchRequest(encode(f"{document}\nQuestion {i}: {_text(rng, 12)}"), 32) for i in range(count)]


def _single(rng: random.Random, encode: Encode, count: int) -> list[BenchRequest]:
    """One request, whatever the count, of 64 prompt tokens and 128 new ones: one stream's speed."""
    return [BenchRequest(encode(_text(rng, 80))[:64], 128)]


def _long(rng: random.Random, encode: Encode, count: int) -> list[BenchRequest]:
    """Prompts of 2,000 to 6,000 words, at most 6,000 tokens, 64 new tokens."""
    return [BenchRequest(encode(_text(rng, rng.choice([2000, 3000, 4000, 6000])))[:6000], 64) for _ in range(count)]


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_VOCABULARY) for _ in range(words))


KINDS: dict[str, Callable[[random.Random, Encode, int], list[BenchRequest]]] = {
    "mixed": _mixed,
    "decode": _decode,
    "prefix": _prefix,
    "single": _single,
    "long": _long,
}
