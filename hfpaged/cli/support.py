"""Say whether a model can run on the engine, what executes its steps there, and why not something faster.

The model is loaded as from_pretrained would, because the answer depends on the classes and weights a checkpoint ends
up with. Exits with 0 where the model can be patched and with 1 where it cannot.
"""

from __future__ import annotations

import argparse
from typing import Any

from transformers import PreTrainedModel

import hfpaged
from hfpaged.errors import UnsupportedModelError
from hfpaged.models.loading import load_model

NAME = "support"
SUMMARY = "say whether a model can be patched, on which tier it runs, and why not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model directory or hub id")


def run(args: argparse.Namespace) -> int:
    """Returns 0 where the model can be patched, else 1."""
    model, label = load_model(args.model, "auto")
    reasons, stats = hfpaged.support(model), {}
    if not reasons:
        try:
            stats = stats_after_one_token(model)
        except UnsupportedModelError as error:
            reasons = error.reasons
    if reasons:
        print(f"{label} ({type(model).__name__}) cannot be patched:")
        print(*(f"  - {reason}" for reason in reasons), sep="\n")
        return 1
    print(f"{label} ({type(model).__name__}) can be patched")
    print(f"tier {stats['tier']}, attention {stats['backend']}")
    for backend, reason in stats["backend_reasons"].items():
        print(f"not {backend}: {reason}")
    if stats["tier_reason"]:
        print(f"no faster tier: {stats['tier_reason']}")
    for reason, count in stats["tier_refusals"].items():
        print(f"  - {count} modules run as they are: {reason}")
    return 0


def stats_after_one_token(model: PreTrainedModel) -> dict[str, Any]:
    """`engine.stats()` once a token was generated: what executes a step is chosen at the first request."""
    with hfpaged.patched(model, num_blocks=1):
        engine = hfpaged.engine(model)
        engine.submit([0], max_new_tokens=1, do_sample=False).result()
        return engine.stats()
