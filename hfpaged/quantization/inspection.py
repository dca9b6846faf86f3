"""Inspection: what the headers and configs of a checkpoint say about each of its modules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from hfpaged.native import library
from hfpaged.quantization.checkpoint import Checkpoint
from hfpaged.quantization.disk_layout import KV_SCALES
from hfpaged.quantization.plans import own_method, plan_of
from hfpaged.quantization.products import Arithmetic, choose_product
from hfpaged.quantization.registration import PackedConfig
from hfpaged.quantization.scheme import Scheme

_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}


@dataclass(frozen=True)
class ModuleReport:
    """One module of a checkpoint.

    Attributes:
        storage: format, groups and scales, in words.
        runs: what will compute it on this machine, and why nothing faster.
    """

    name: str
    storage: str
    num_bytes: int
    runs: str


class Inspection:
    """A checkpoint directory.

    Args:
        capability: compute capability of the GPU that is asked about; None: there is none.

    Raises:
        CheckpointError: its configs contradict each other.
    """

    def __init__(self, folder: Path, capability: tuple[int, int] | None = None):
        self._capability = capability
        self._checkpoint = Checkpoint(folder)
        self._method = own_method(self._checkpoint)
        self._plan = None
        if self._method is not None:
            self._plan = plan_of(self._checkpoint, PackedConfig(source_method=self._method))

    def lines(self, every_module: bool = False) -> Iterator[str]:
        """The report for a terminal: the checkpoint, then its modules, alike ones in one line unless `every_module`."""
        config = self._checkpoint.quantization or {}
        method = self._method or config.get("quant_method")
        architecture = ", ".join(self._checkpoint.config.get("architectures") or ["unknown architecture"])
        reports = list(self.modules())
        total = sum(report.num_bytes for report in reports) / 2**20
        yield f"{self._checkpoint.folder.name}: {architecture}, {method or 'not quantized'}, {total:.1f} MiB"
        yield f"loaded by {'hfpaged' if self._method else 'Transformers'}"
        scales = sum(name.rpartition(".")[2] in KV_SCALES for name in self._checkpoint.tensors)
        if scales:
            yield f"{scales} scales of keys and values, kept"
        yield from _table(reports if every_module else _merged(reports))

    def modules(self) -> Iterator[ModuleReport]:
        """Every module that holds tensors."""
        for name in self._checkpoint.modules:
            leaves = list(self._checkpoint.names_under(name))
            stored = [self._checkpoint.tensors[f"{name}.{leaf}" if name else leaf] for leaf in leaves]
            num_bytes = sum(prod(one.shape) * _BYTES.get(one.dtype, 1) for one in stored)
            scheme = None
            if self._plan is not None and any(leaf.startswith("weight_") for leaf in leaves):
                scheme = self._plan.scheme_of(name)
            if scheme is not None:
                yield ModuleReport(name, _storage(scheme), num_bytes, self._kernels(scheme))
            else:
                kinds = ", ".join(sorted({one.dtype for one in stored}))
                runs = "as Transformers and its libraries do" if self._is_stock(leaves) else "dense"
                yield ModuleReport(name, kinds, num_bytes, runs)

    def _kernels(self, scheme: Scheme) -> str:
        on_cpu = _kernel_on_cpu(scheme)
        if self._capability is None:
            return on_cpu
        product, reason = choose_product(_arithmetic(scheme), self._capability)
        return f"GPU: {product or f'dequantized at every call ({reason})'}. CPU: {on_cpu}"

    def _is_stock(self, leaves: list[str]) -> bool:
        return self._plan is None and self._checkpoint.quantization is not None and set(leaves) > {"weight"}


def _storage(scheme: Scheme) -> str:
    rows, columns = scheme.block
    scale = "one scale for the tensor"
    if rows or columns:
        scale = f"scales for {rows or 'all'} x {columns or 'all'}"
    if scheme.activation is None:
        return f"{scheme.format.value}, {scale}"
    inputs = f"{'static' if scheme.static_activation else 'dynamic'} {scheme.activation} inputs"
    return f"{scheme.format.value}, {scale}, {inputs}"


def _arithmetic(scheme: Scheme) -> Arithmetic:
    scale_of = {(0, 0): "tensor", (1, 0): "row"}.get(scheme.block, "block")
    return Arithmetic(scheme.format, scale_of, scheme.activation, scheme.static_activation)


def _kernel_on_cpu(scheme: Scheme) -> str:
    if not scheme.format.is_four_bit:
        base = "converted when loaded (no CPU multiplies 8-bit floats faster)"
    elif library.unavailable():
        base = f"dequantized at every call: {library.unavailable()}"
    else:
        base = f"packed, {library.isa()} kernel"
        if library.isa() != library.ISAS[-1]:
            base += f" (this CPU has no {library.ISAS[-1]})"
    if scheme.activation is not None:
        base += "; inputs are rounded, so by modules: activations='weight-only' is faster"
    return base


def _merged(reports: list[ModuleReport]) -> list[ModuleReport]:
    """Modules of all layers in one: numbers in their names become stars."""
    merged: dict[tuple[str, str, str], int] = {}
    for report in reports:
        key = (re.sub(r"\.\d+(?=\.|$)", ".*", report.name), report.storage, report.runs)
        merged[key] = merged.get(key, 0) + report.num_bytes
    return [ModuleReport(name, storage, size, runs) for (name, storage, runs), size in merged.items()]


def _table(reports: list[ModuleReport]) -> Iterator[str]:
    names = max((len(report.name) for report in reports), default=0)
    kinds = max((len(report.storage) for report in reports), default=0)
    for report in reports:
        size = f"{report.num_bytes / 2**20:8.2f} MiB"
        yield f"  {report.name:{names}}  {report.storage:{kinds}}  {size}  {report.runs}"
