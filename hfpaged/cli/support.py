"""Say whether a model can run on the engine, and if not, why.

The model is loaded as from_pretrained would, because the answer depends on the classes and weights a checkpoint ends
up with. Exits with 0 where the model can be patched and with 1 where it cannot.
"""

from __future__ import annotations

import argparse

import hfpaged
from hfpaged.models.loading import load_model

NAME = "support"
SUMMARY = "say whether a model can be patched, and why not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model directory or hub id")


def run(args: argparse.Namespace) -> int:
    """Returns 0 where the model can be patched, else 1."""
    model, label = load_model(args.model, "auto")
    reasons = hfpaged.support(model)
    if not reasons:
        print(f"{label} ({type(model).__name__}) can be patched")
        return 0
    print(f"{label} ({type(model).__name__}) cannot be patched:")
    for reason in reasons:
        print(f"  - {reason}")
    return 1
