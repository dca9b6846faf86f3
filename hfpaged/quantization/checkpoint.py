"""Checkpoint: the files of a saved model as they are on disk, read by tensor name without loading everything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hfpaged.errors import CheckpointError

CONFIG_FILE = "config.json"
MODELOPT_FILE = "hf_quant_config.json"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """Header entry of one tensor: dtype as safetensors spells it, shape, and the file that holds it."""

    dtype: str
    shape: tuple[int, ...]
    file: Path


class Checkpoint:
    """A directory of safetensors files with its config.

    Attributes:
        folder: the directory.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    @property
    def exists(self) -> bool:
        """Whether there are safetensors files to read."""
        return bool(self._files)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json.

        Raises:
            CheckpointError: it is missing or no JSON object.
        """
        return self._json(CONFIG_FILE)

    @cached_property
    def modelopt(self) -> dict[str, Any] | None:
        """The `quantization` part of hf_quant_config.json, which older exports of modelopt have instead of a config."""
        if not (self.folder / MODELOPT_FILE).exists():
            return None
        part = self._json(MODELOPT_FILE).get("quantization")
        if not isinstance(part, dict):
            raise CheckpointError(f"{MODELOPT_FILE} has no 'quantization' object")
        return part

    @property
    def quantization(self) -> dict[str, Any] | None:
        """`quantization_config` of the config or of its text part; None without one."""
        for part in (self.config, self.config.get("text_config") or {}):
            if part.get("quantization_config"):
                return part["quantization_config"]
        return None

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor by name, from the headers.

        Raises:
            CheckpointError: a file is damaged, or one named by the index is missing.
        """
        found: dict[str, StoredTensor] = {}
        for file in self._files:
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():
                        part = opened.get_slice(name)
                        found[name] = StoredTensor(part.get_dtype(), tuple(part.get_shape()), file)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file.name} cannot be read: {error}") from error
        return found

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        with safe_open(self.tensors[name].file, framework="pt") as opened:
            return opened.get_tensor(name)

    def names_under(self, module: str) -> Iterator[str]:
        """Last parts of the names of the tensors that lie directly in a module."""
        return iter(self._by_module.get(module, ()))

    @property
    def modules(self) -> list[str]:
        """Every module that holds tensors."""
        return list(self._by_module)

    @cached_property
    def _by_module(self) -> dict[str, list[str]]:
        modules: dict[str, list[str]] = {}
        for name in self.tensors:
            module, _, leaf = name.rpartition(".")
            modules.setdefault(module, []).append(leaf)
        return modules

    @cached_property
    def _files(self) -> list[Path]:
        index = self.folder / INDEX_FILE
        if not index.exists():
            return sorted(self.folder.glob("*.safetensors"))
        names = sorted(set(self._json(INDEX_FILE).get("weight_map", {}).values()))
        missing = [name for name in names if not (self.folder / name).exists()]
        if missing:
            raise CheckpointError(f"{INDEX_FILE} names {missing[0]}, which is not there")
        return [self.folder / name for name in names]

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{name} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{name} is no JSON object")
        return content
