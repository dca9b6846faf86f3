"""Argument types and options that more than one subcommand takes."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import TypeVar

DTYPES = ("float32", "bfloat16", "float16")


Number = TypeVar("Number", int, float)


def number(
    kind: Callable[[str], Number], is_allowed: Callable[[Number], bool], expected: str
) -> Callable[[str], Number]:
    """An argparse type: numbers that `is_allowed` takes. `expected` says in an error what they are."""

    def parse(text: str) -> Number:
        with contextlib.suppress(ValueError):
            if is_allowed(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")

    return parse


positive_int = number(int, lambda value: value >= 1, "a positive integer")
count = number(int, lambda value: value >= 0, "an integer from 0")
port = number(int, lambda value: 0 <= value < 1 << 16, "a port, an integer from 0 to 65535")
# What `transformers.set_seed` takes: NumPy has no larger ones.
seed = number(int, lambda value: 0 <= value < 1 << 32, "an integer from 0 to 2**32 - 1")
positive_float = number(float, lambda value: 0 < value < math.inf, "a positive number")
seconds = number(float, lambda value: 0 <= value < math.inf, "a number of seconds from 0")
share = number(float, lambda value: 0 < value <= 1, "above 0 and at most 1")


def add_model_options(parser: argparse.ArgumentParser, default_dtype: str) -> None:
    """Add --model, --dtype and --threads."""
    parser.add_argument(
        "--model", metavar="M", help="model directory or hub id (default: SmolLM2-135M-Instruct, downloaded once)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default=default_dtype, help="dtype of the weights (default: %(default)s)"
    )
    parser.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads (default: torch's choice)")
