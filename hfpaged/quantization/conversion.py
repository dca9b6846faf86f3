"""Packs a dense checkpoint into a 4-bit one in the layout of compressed-tensors, shard by shard, resumable."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hfpaged.errors import CheckpointError
from hfpaged.quantization.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint
from hfpaged.quantization.packing import group_of, quantize_weight
from hfpaged.quantization.record import QuantizedLinear, WeightFormat

_FORMATS = {
    WeightFormat.NVFP4: "nvfp4-pack-quantized",
    WeightFormat.MXFP4: "mxfp4-pack-quantized",
    WeightFormat.INT4: "pack-quantized",
}
# Layers that read the same input; kernels that multiply them together need one global scale.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_SHARD_BYTES = 1 << 30


@dataclass
class SquaredError:
    """Squared error against the source, summed over the packed weights.

    Attributes:
        difference, norm: sums of squares of weight - packed weight, and of the weights.
        worst: (relative error, name) of the layer with the largest.
    """

    difference: float = 0.0
    norm: float = 0.0
    worst: tuple[float, str] = (0.0, "")

    @property
    def relative(self) -> float:
        """Root of the ratio of the sums."""
        return (self.difference / max(self.norm, 1e-30)) ** 0.5

    def add(self, name: str, weight: torch.Tensor, record: QuantizedLinear) -> None:
        """Count one layer."""
        difference = (record.dequantize() - weight.float()).square().sum().item()
        norm = weight.float().square().sum().item()
        self.difference += difference
        self.norm += norm
        self.worst = max(self.worst, ((difference / max(norm, 1e-30)) ** 0.5, name))


class Conversion:
    """One conversion of the checkpoint in `source` to `target`.

    Raises:
        CheckpointError: the source is quantized already, has no safetensors, or holds no layer that can be packed.
    """

    def __init__(self, source: Path, target: Path, form: WeightFormat):
        self._checkpoint = Checkpoint(source)
        self._target = target
        self._form = form
        if not self._checkpoint.exists:
            raise CheckpointError(f"{source} has no safetensors files")
        if self._checkpoint.quantization or self._checkpoint.modelopt:
            raise CheckpointError(f"{source} is quantized already")
        self._groups = self._packable()
        if not self._groups:
            raise CheckpointError(f"{source} has no linear layer that {form.value} can hold")
        self.error = SquaredError()

    @property
    def num_tensors(self) -> int:
        """Tensors to go through."""
        return len(self._checkpoint.tensors)

    def run(self, on_tensor: Callable[[str], None]) -> None:
        """Write every shard that is not there yet, then index and config.

        Args:
            on_tensor: called with the name of each tensor when it is done.
        """
        self._target.mkdir(parents=True, exist_ok=True)
        shards = self._shards()
        weight_map: dict[str, str] = {}
        for index, names in enumerate(shards, 1):
            file = self._target / f"model-{index:05d}-of-{len(shards):05d}.safetensors"
            stored = self._finished(file, names)
            if stored is None:
                stored = self._write_shard(file, names, on_tensor)
            else:
                for name in names:
                    on_tensor(name)
            weight_map |= dict.fromkeys(stored, file.name)
        self._write_configs(weight_map)

    def _packable(self) -> dict[str, int]:
        """Group size of each linear module that is packed, all of them but the head."""
        config = AutoConfig.from_pretrained(self._checkpoint.folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        head = model.get_output_embeddings()
        groups = {}
        for name, module in model.named_modules():
            if type(module) is nn.Linear and module is not head and f"{name}.weight" in self._checkpoint.tensors:
                group = group_of(self._form, module.in_features)
                if group is not None:
                    groups[name] = group
        # One group size for all: the config has one for a group of modules.
        smallest = min(groups.values(), default=0)
        return {name: smallest for name in groups}

    def _shards(self) -> list[list[str]]:
        shards: list[list[str]] = [[]]
        size = 0
        for name in self._checkpoint.tensors:
            num_bytes = torch.Size(self._checkpoint.tensors[name].shape).numel() * 2
            if shards[-1] and size + num_bytes > _SHARD_BYTES:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += num_bytes
        return shards

    def _write_shard(self, file: Path, names: list[str], on_tensor: Callable[[str], None]) -> list[str]:
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            module = name.removesuffix(".weight")
            if name.endswith(".weight") and module in self._groups:
                tensors |= {f"{module}.{leaf}": value for leaf, value in self._packed(module).items()}
            else:
                value = self._checkpoint.read(name)
                tensors[name] = value.bfloat16() if value.dtype == torch.float32 else value
            on_tensor(name)
        # Under another name first, so that a file that is there is whole.
        partial = file.with_suffix(f".{os.getpid()}.partial")
        metadata = {"format": "pt", "packed": self._form.value, "sources": str(len(names)), "error": self._error_text()}
        save_file(tensors, partial, metadata=metadata)
        os.replace(partial, file)
        return list(tensors)

    def _packed(self, module: str) -> dict[str, torch.Tensor]:
        weight = self._checkpoint.read(f"{module}.weight")
        largest = self._largest(module) if self._form is WeightFormat.NVFP4 else None
        record = quantize_weight(weight, self._form, self._groups[module], largest)
        self.error.add(module, weight, record)
        if self._form is WeightFormat.INT4:
            codes = record.codes.view(torch.int32)
            return {"weight_packed": codes, "weight_scale": record.scales, "weight_shape": torch.tensor(weight.shape)}
        tensors = {"weight_packed": record.codes, "weight_scale": record.scales}
        if self._form is WeightFormat.NVFP4:
            tensors["weight_global_scale"] = torch.tensor([1.0 / record.global_scale])
        return tensors

    def _largest(self, module: str) -> float:
        """Largest magnitude among the layers that run together with this one."""
        parent, _, leaf = module.rpartition(".")
        together = next((names for names in _TOGETHER if leaf in names), (leaf,))
        present = [f"{parent}.{name}.weight" for name in together if f"{parent}.{name}" in self._groups]
        return max(self._checkpoint.read(name).abs().max().item() for name in present)

    def _finished(self, file: Path, names: list[str]) -> list[str] | None:
        """Names of the tensors of a shard that an earlier run wrote; None: there is none."""
        if not file.exists():
            return None
        from safetensors import safe_open

        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("packed") != self._form.value or metadata.get("sources") != str(len(names)):
                raise CheckpointError(f"{file} is from another conversion; choose an empty folder")
            before = json.loads(metadata["error"])
            self.error = SquaredError(before["difference"], before["norm"], tuple(before["worst"]))
            return list(opened.keys())

    def _error_text(self) -> str:
        error = self.error
        return json.dumps({"difference": error.difference, "norm": error.norm, "worst": error.worst})

    def _write_configs(self, weight_map: dict[str, str]) -> None:
        for file in self._checkpoint.folder.iterdir():
            if file.suffix in (".json", ".jinja", ".txt", ".model") and file.name != INDEX_FILE:
                shutil.copy(file, self._target)
        index = {"metadata": {}, "weight_map": weight_map}
        (self._target / INDEX_FILE).write_text(json.dumps(index, indent=1))
        config = {**self._checkpoint.config, "dtype": "bfloat16", "quantization_config": self._quantization_config()}
        (self._target / CONFIG_FILE).write_text(json.dumps(config, indent=2))

    def _quantization_config(self) -> dict[str, object]:
        form, group = self._form, next(iter(self._groups.values()))
        kind = "int" if form is WeightFormat.INT4 else "float"
        strategy = "tensor_group" if form is WeightFormat.NVFP4 else "group"
        weights: dict[str, object] = {
            "num_bits": 4, "type": kind, "strategy": strategy, "group_size": group, "symmetric": True, "dynamic": False,
        }  # fmt: skip
        scale = {WeightFormat.NVFP4: "torch.float8_e4m3fn", WeightFormat.MXFP4: "torch.uint8"}.get(form)
        if scale is not None:
            weights |= {"scale_dtype": scale, "zp_dtype": scale}
        scheme = {"targets": sorted(self._targets()), "format": _FORMATS[form], "weights": weights}
        return {
            "quant_method": "compressed-tensors", "format": _FORMATS[form], "quantization_status": "compressed",
            "ignore": ["lm_head"], "kv_cache_scheme": None,
            "config_groups": {"group_0": {**scheme, "input_activations": None, "output_activations": None}},
        }  # fmt: skip

    def _targets(self) -> set[str]:
        """ "Linear" where all linear modules are packed, else their names."""
        dense = {
            name.removesuffix(".weight")
            for name, stored in self._checkpoint.tensors.items()
            if name.endswith("_proj.weight") and len(stored.shape) == 2
        } - set(self._groups)
        return set(self._groups) if dense else {"Linear"}
