"""Load the model and tokenizer that a user names."""

from __future__ import annotations

import textwrap
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hfpaged.errors import InputError
from hfpaged.models.default_model import default_model
from hfpaged.quantization.loader import from_pretrained

LONGEST_REASON = 240


def load(name: str | None, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Load a model directory or hub id (None: the default model) with its tokenizer.

    Returns:
        The model as `load_model` gives it, its tokenizer, and the name to show for it.

    Raises:
        InputError: nothing that loads as a causal language model with a tokenizer goes by that name.
        ModelDownloadError: the default model is wanted and cannot be had.
    """
    tokenizer = load_tokenizer(resolve(name)[0])
    model, label = load_model(name, dtype)
    return model, tokenizer, label


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub id; raises InputError if there is none."""
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise _cannot_load(source, error) from error


def load_model(name: str | None, dtype: str) -> tuple[PreTrainedModel, str]:
    """Load a causal language model alone, unpatched and in eval mode, on the GPU where there is one.

    Returns:
        The model and the name to show for it. `dtype` is a torch dtype's name, or "auto" for the checkpoint's own.
    """
    source, label = resolve(name)
    try:
        model = from_pretrained(source, dtype=dtype)
    except (OSError, ValueError) as error:
        raise _cannot_load(source, error) from error
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), label


def resolve(name: str | None) -> tuple[str | Path, str]:
    """What to give `from_pretrained`, and the name to show, for what a user names.

    Raises:
        InputError: it can only be a path, and nothing is there.
        ModelDownloadError: see `load`.
    """
    if name is None:
        default = default_model()
        return default.path, default.label
    if _is_path(name) and not Path(name).exists():
        raise InputError(f"{name} is no directory")
    return name, Path(name).resolve().name if Path(name).is_dir() else name


def _is_path(name: str) -> bool:
    """Whether no hub id looks like that: they are NAME or OWNER/NAME."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def set_threads(threads: int | None) -> int:
    """Set torch's CPU thread count where one is asked for; returns the count in force."""
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def _cannot_load(source: str | Path, error: Exception) -> InputError:
    reason = textwrap.shorten(str(error) or type(error).__name__, LONGEST_REASON, placeholder=" ...")
    return InputError(f"cannot load {str(source)!r}: {reason}")
