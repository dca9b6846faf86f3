"""Argument types and options that more than one subcommand takes."""

from __future__ import annotations

import argparse

DTYPES = ("float32", "bfloat16", "float16")


def positive_int(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return value


def add_model_options(parser: argparse.ArgumentParser, default_dtype: str) -> None:
    """Add --model, --dtype and --threads."""
    parser.add_argument(
        "--model", metavar="M", help="model directory or hub id (default: SmolLM2-135M-Instruct, downloaded once)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default=default_dtype, help="dtype of the weights (default: %(default)s)"
    )
    parser.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads (default: torch's choice)")
