"""What the examples of this package share: their arguments, the model that they run on, and packages they want."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hfpaged.errors import MissingDependencyError
from hfpaged.models.default_model import default_model


def parse(description: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line of an example: `model` and `new_tokens`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", nargs="?", help="a directory or hub name; default: SmolLM2-135M-Instruct")
    parser.add_argument("--new-tokens", type=int, default=16)
    return parser.parse_args(arguments)


def load(model: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of this name in float32, not patched, and its tokenizer."""
    path = model or default_model().path
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)


def require(module: str, package: str) -> ModuleType:
    """Import an optional package.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(f"this example needs {module}: pip install {package}") from error


def show(name: str, text: str, is_same: bool) -> None:
    """One line: whether a text is as it should be, and the text."""
    print(f"{name:17} {'as stock' if is_same else 'DIFFERS '}  {text!r}")
