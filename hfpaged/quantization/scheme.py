"""What a checkpoint's configs say about the quantization of each module."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hfpaged.errors import CheckpointError
from hfpaged.quantization.record import WeightFormat

NVFP4_GROUP = 16
MXFP4_GROUP = 32


@dataclass(frozen=True)
class Scheme:
    """How the linear layers of one group are quantized.

    Attributes:
        dialect: whose tensor names and conventions: "modelopt", "compressed-tensors" or "fp8".
        block: (rows, columns) of one scale; 0 stands for all.
        activation: format of the quantized input; None: it is not quantized.
        static_activation: the checkpoint holds the scale of the input.
    """

    dialect: str
    format: WeightFormat
    block: tuple[int, int]
    activation: str | None = None
    static_activation: bool = False


class QuantizationPlan:
    """The scheme of every module, from the parsed config.

    Attributes:
        dialect: as in `Scheme`.
        has_kv_scales: the config promises scales of keys and values.
    """

    def __init__(
        self, dialect: str, groups: list[tuple[list[str], Scheme]], ignore: list[str], has_kv_scales: bool = False
    ):
        self.dialect = dialect
        self.has_kv_scales = has_kv_scales
        self._groups = groups
        self._ignore = ignore

    def scheme_of(self, name: str, class_name: str = "Linear") -> Scheme | None:
        """The scheme of module `name`: that of the first group that targets it. None: it is not quantized."""
        if any(_matches(pattern, name, class_name) for pattern in self._ignore):
            return None
        for targets, scheme in self._groups:
            if any(_matches(pattern, name, class_name) for pattern in targets):
                return scheme
        return None


def _matches(pattern: str, name: str, class_name: str) -> bool:
    """Whether a target or exclusion means a module: class name, module or parent of it, wildcards, or `re:`."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern in (class_name, name) or name.startswith(pattern + ".") or fnmatch.fnmatchcase(name, pattern)


# ---- modelopt ----

_MODELOPT_ALGORITHMS = {
    "NVFP4": Scheme("modelopt", WeightFormat.NVFP4, (1, NVFP4_GROUP), "nvfp4", static_activation=True),
    "W4A16_NVFP4": Scheme("modelopt", WeightFormat.NVFP4, (1, NVFP4_GROUP)),
    "FP8": Scheme("modelopt", WeightFormat.FP8, (0, 0), "fp8", static_activation=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("modelopt", WeightFormat.FP8, (1, 0), "fp8"),
}


def modelopt_plan(config: Mapping[str, Any] | None, file: Mapping[str, Any] | None) -> QuantizationPlan:
    """Plan of a modelopt checkpoint.

    Args:
        config: `quantization_config` of config.json; None in older exports.
        file: `quantization` of hf_quant_config.json; None if there is no such file.

    Raises:
        CheckpointError: the two contradict each other, or an algorithm is not supported.
    """
    if config is not None and file is not None:
        _require_agreement(config, file)
    source = dict(file or {}, **(config or {}))
    ignore = list(source.get("ignore") or source.get("exclude_modules") or [])
    groups = _modelopt_groups(source)
    has_kv = bool(source.get("kv_cache_scheme") or source.get("kv_cache_quant_algo"))
    return QuantizationPlan("modelopt", groups, ignore, has_kv)


def _modelopt_groups(source: Mapping[str, Any]) -> list[tuple[list[str], Scheme]]:
    algorithm = source.get("quant_algo")
    if algorithm != "MIXED_PRECISION":
        return [(["Linear"], _modelopt_scheme(algorithm, source.get("group_size")))]
    layers = source.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise CheckpointError("quant_algo is MIXED_PRECISION but quantized_layers names no layer")
    groups: dict[Scheme, list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault(_modelopt_scheme(layer.get("quant_algo"), layer.get("group_size")), []).append(name)
    return [(names, scheme) for scheme, names in groups.items()]


def _modelopt_scheme(algorithm: str | None, group_size: int | None) -> Scheme:
    scheme = _MODELOPT_ALGORITHMS.get(str(algorithm))
    if scheme is None:
        known = ", ".join([*_MODELOPT_ALGORITHMS, "MIXED_PRECISION"])
        raise CheckpointError(f"quant_algo {algorithm!r} of modelopt is not supported; supported: {known}")
    if scheme.format is WeightFormat.NVFP4 and group_size not in (None, NVFP4_GROUP):
        raise CheckpointError(f"NVFP4 has groups of {NVFP4_GROUP}, but group_size is {group_size}")
    return scheme


def _require_agreement(config: Mapping[str, Any], file: Mapping[str, Any]) -> None:
    pairs = {
        "quant_algo": (config.get("quant_algo"), file.get("quant_algo")),
        "excluded modules": (_names(config.get("ignore")), _names(file.get("exclude_modules"))),
        "kv cache quantization": (bool(config.get("kv_cache_scheme")), bool(file.get("kv_cache_quant_algo"))),
    }
    for what, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise CheckpointError(f"config.json and hf_quant_config.json disagree on {what}: {ours} and {theirs}")


def _names(names: Iterable[str] | None) -> list[str]:
    return sorted(names or ())


# ---- compressed-tensors ----


def compressed_tensors_plan(config: Mapping[str, Any]) -> QuantizationPlan:
    """Plan of a compressed-tensors checkpoint whose groups are all in formats that hfpaged reads itself.

    Raises:
        CheckpointError: a group is in another format, or its fields contradict its format.
    """
    if config.get("quantization_status") not in (None, "compressed"):
        raise CheckpointError(f"quantization_status is {config['quantization_status']!r}, not 'compressed'")
    groups = [
        (list(group.get("targets") or ["Linear"]), _compressed_scheme(name, group, config.get("format")))
        for name, group in (config.get("config_groups") or {}).items()
    ]
    return QuantizationPlan(
        "compressed-tensors", groups, list(config.get("ignore") or []), bool(config.get("kv_cache_scheme"))
    )


COMPRESSED_FORMATS = {
    "nvfp4-pack-quantized": (WeightFormat.NVFP4, NVFP4_GROUP),
    "mxfp4-pack-quantized": (WeightFormat.MXFP4, MXFP4_GROUP),
    "pack-quantized": (WeightFormat.INT4, None),
}


def _compressed_scheme(name: str, group: Mapping[str, Any], default_format: str | None) -> Scheme:
    form, weights = group.get("format") or default_format, group.get("weights") or {}
    if form not in COMPRESSED_FORMATS:
        raise CheckpointError(f"{name}: the format {form!r} is left to compressed-tensors itself")
    kind, fixed_group = COMPRESSED_FORMATS[form]
    wanted_type = "int" if kind is WeightFormat.INT4 else "float"
    if weights.get("num_bits") != 4 or weights.get("type") != wanted_type:
        raise CheckpointError(f"{name}: {form} holds 4-bit {wanted_type} weights, but the config says {weights}")
    size = weights.get("group_size")
    if fixed_group is not None and size not in (None, fixed_group):
        raise CheckpointError(f"{name}: {form} has groups of {fixed_group}, but group_size is {size}")
    # A scale for a whole row (strategy "channel") is a group as wide as the row.
    columns = fixed_group or (0 if size in (None, -1) else int(size))
    return Scheme("compressed-tensors", kind, (1, columns), *_compressed_activation(name, group))


def _compressed_activation(name: str, group: Mapping[str, Any]) -> tuple[str | None, bool]:
    activation = group.get("input_activations")
    if activation is None:
        return None, False
    kind = (activation.get("num_bits"), activation.get("type"), activation.get("group_size"))
    if kind == (4, "float", NVFP4_GROUP):
        return "nvfp4", True
    if kind == (4, "float", MXFP4_GROUP):
        return "mxfp4", False
    if kind[:2] == (8, "float"):
        return "fp8", not activation.get("dynamic")
    raise CheckpointError(f"{name}: input_activations {dict(activation)} cannot be emulated")


# ---- block-quantized FP8 ----


def fp8_plan(config: Mapping[str, Any]) -> QuantizationPlan:
    """Plan of a `quant_method: fp8` checkpoint, by the block size of its config and not by the grid of its scales."""
    block = config.get("weight_block_size")
    if block is not None and (len(block) != 2 or min(block) < 1):
        raise CheckpointError(f"weight_block_size must be two positive numbers, got {block}")
    # Without a list Transformers leaves the head out, which is what checkpoints without one were made with.
    ignore = list(config.get("modules_to_not_convert") or config.get("ignored_layers") or ["lm_head"])
    # As Transformers on a CPU: the weights are dequantized and the input stays as it is.
    return QuantizationPlan("fp8", [(["Linear"], Scheme("fp8", WeightFormat.FP8, tuple(block or (0, 0))))], ignore)
