"""NativeProgram: the native object behind a step program, and all memory that its operations point to."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from hfpaged.errors import NativeKernelError
from hfpaged.fusion.registry import Admission
from hfpaged.program import abi
from hfpaged.program.abi import OpKind, RowSet
from hfpaged.program.description import LogitScaling, Norm, RotaryCall, TableForm
from hfpaged.program.head_screen import ScreenedMatrix, can_screen
from hfpaged.program.norms import beta_of, gamma_of
from hfpaged.program.panels import PackedMatrix, Part
from hfpaged.program.rotary import RotaryTable
from hfpaged.program.strip_matrix import StripMatrix


@dataclass(frozen=True)
class OpRange:
    """Operations [first, end)."""

    first: int
    end: int


class NormVectors:
    """fp32 weights of one norm in memory of their own, as its module holds them at the last `copy`."""

    def __init__(self, norm: Norm):
        self._norm = norm
        beta = beta_of(norm)
        self._gamma = gamma_of(norm).numpy().copy()
        self._beta = None if beta is None else beta.numpy().copy()

    def copy(self) -> None:
        """Take the present weights of the module."""
        self._gamma[:] = gamma_of(self._norm).numpy()
        if self._beta is not None:
            self._beta[:] = beta_of(self._norm).numpy()

    def struct(self) -> abi.NormWeights:
        """For the kernels; valid as long as this object lives."""
        beta = None if self._beta is None else self._beta.ctypes.data
        return abi.NormWeights(self._gamma.ctypes.data, beta, int(self._norm.kind), self._norm.epsilon)


class NativeProgram:
    """A list of native operations, appended one by one and run in ranges.

    Attributes:
        labels: what each operation so far does; equal ones do the same work, in other layers.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype):
        self._library = library
        self._dtype = dtype
        self._handle = library.hfp_program_create(abi.DTYPE_CODES[dtype])
        if not self._handle:
            raise NativeKernelError("out of memory for a program")
        weakref.finalize(self, library.hfp_program_destroy, self._handle)
        self.labels: list[str] = []
        self._matrices: list[PackedMatrix | StripMatrix] = []
        self._norms: list[NormVectors] = []
        self._tables: list[RotaryTable] = []
        self._sinks: list[tuple[nn.Module, str, np.ndarray]] = []
        self._weight_arrays: list[ctypes.Array] = []
        self._embeddings: list[tuple[int, abi.EmbedOp, nn.Module]] = []

    @property
    def num_ops(self) -> int:
        """Operations so far."""
        return len(self.labels)

    def ops_since(self, first: int) -> OpRange:
        """The operations from `first` on."""
        return OpRange(first, self.num_ops)

    @property
    def packed_bytes(self) -> int:
        """Memory that the products read: packed copies, and weights in 4 bits where they are."""
        return sum(matrix.num_bytes for matrix in self._matrices)

    @property
    def packed_matrices(self) -> list[PackedMatrix]:
        """The packed copies."""
        return [matrix for matrix in self._matrices if isinstance(matrix, PackedMatrix)]

    def read_bytes(self, rows: int) -> int:
        """The part of `packed_bytes` that a step of `rows` sampled rows reads if it wants no logits."""
        screened = [matrix for matrix in self._matrices if isinstance(matrix, ScreenedMatrix)]
        return self.packed_bytes - sum(matrix.unread_bytes(rows) for matrix in screened)

    @property
    def shared_bytes(self) -> int:
        """The part of `packed_bytes` that is the live modules' own memory: weights in 4 bits."""
        return sum(matrix.num_bytes for matrix in self._matrices if isinstance(matrix, StripMatrix))

    def add_buffer(self, width: int, rows: RowSet = RowSet.TOKENS) -> int:
        """A buffer of activations, `width` elements a row. Returns its index."""
        return self._library.hfp_program_add_buffer(self._handle, width, rows)

    def add(self, admission: Admission, kind: OpKind, struct: ctypes.Structure) -> None:
        """Append an operation, which takes the admission of the fusion that it belongs to.

        Raises:
            NativeKernelError: there is no such admission, or the library was built from another version of the struct.
        """
        if not isinstance(admission, Admission):
            raise NativeKernelError(f"{kind.name} was not admitted by the guard of its fusion")
        index = self._library.hfp_program_add_op(self._handle, kind, ctypes.byref(struct), ctypes.sizeof(struct))
        if index != len(self.labels):
            raise NativeKernelError(f"the kernels and abi.py disagree on {type(struct).__name__}")
        self.labels.append(_label(kind, struct))

    def add_embedding(self, admission: Admission, module: nn.Module, out: int, scale: float) -> None:
        """Append the embedding. It reads the module's own weight, not a copy."""
        rows, width = module.weight.shape
        struct = abi.EmbedOp(module.weight.data_ptr(), rows, width, out, scale)
        self._embeddings.append((self.num_ops, struct, module))
        self.add(admission, OpKind.EMBED, struct)

    @property
    def num_elements(self) -> int:
        """Weights in all matrices."""
        return sum(matrix.num_elements for matrix in self._matrices)

    def pack(self, parts: list[Part]) -> abi.PackedWeight:
        """A packed matrix for the kernels, empty until `refresh`; one in 4 bits is the modules' own.

        Raises:
            NotRecognized: the parts cannot be one matrix.
        """
        if any(part.linear.packed is not None for part in parts):
            self._matrices.append(StripMatrix(parts))
        else:
            self._matrices.append(PackedMatrix(self._library, parts, self._dtype))
        return self._matrices[-1].weight

    def pack_head(self, parts: list[Part], scaling: LogitScaling) -> tuple[abi.PackedWeight, abi.HeadScreen]:
        """As `pack`, for the head: with a screen where it can have one."""
        is_packed = any(part.linear.packed is not None for part in parts)
        if is_packed or not can_screen(scaling, parts[0].linear.in_features):
            return self.pack(parts), abi.HeadScreen()
        matrix = ScreenedMatrix(self._library, parts, self._dtype)
        self._matrices.append(matrix)
        return matrix.weight, matrix.screen

    def norm_weights(self, norm: Norm | None) -> abi.NormWeights:
        """Weights of a norm for the kernels; null pointers for None."""
        if norm is None:
            return abi.NormWeights()
        self._norms.append(NormVectors(norm))
        return self._norms[-1].struct()

    def rotary_table(self, call: RotaryCall | None, form: TableForm) -> int:
        """Index of the table of a rotary call; equal calls share one."""
        if call is None:
            return 0
        for index, table in enumerate(self._tables):
            if table.serves(call, form):
                return index
        self._tables.append(RotaryTable(call, form))
        return len(self._tables) - 1

    def sinks(self, module: nn.Module, name: str | None) -> int | None:
        """Address of an fp32 copy of a parameter with one logit per head; None without one."""
        if name is None:
            return None
        self._sinks.append((module, name, getattr(module, name).detach().float().numpy().copy()))
        return self._sinks[-1][2].ctypes.data

    def weight_array(self, weights: list[abi.PackedWeight]) -> ctypes.Array:
        """An array of packed weights that the kernels may point to."""
        array = (abi.PackedWeight * len(weights))(*weights)
        self._weight_arrays.append(array)
        return array

    def refresh(self, modules: set[nn.Module] | None, num_threads: int) -> None:
        """Copy the weights of `modules`, or all, from the live modules.

        Raises:
            NotRecognized: a weight changed its shape, dtype or device.
        """
        for matrix in self._matrices:
            if modules is None or matrix.uses(modules):
                matrix.pack(num_threads)
        for vectors in self._norms:
            vectors.copy()
        for module, name, copy in self._sinks:
            copy[:] = getattr(module, name).detach().float().numpy()
        for index, table in enumerate(self._tables):
            if table.positions:
                table.compute(table.positions)
                self.set_table(index, table.cosine, table.sine)
        for index, struct, module in self._embeddings:
            struct.table = module.weight.data_ptr()
            self._library.hfp_program_replace_op(
                self._handle, index, OpKind.EMBED, ctypes.byref(struct), ctypes.sizeof(struct)
            )

    def prepare_positions(self, positions: int) -> None:
        """Have the rotary tables reach position `positions` - 1."""
        for index, table in enumerate(self._tables):
            if table.grow(positions):
                self.set_table(index, table.cosine, table.sine)

    def set_table(self, index: int, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        """Have rotary table `index` be these: fp32 [positions, width], contiguous, and kept alive by the caller."""
        self._library.hfp_program_set_table(self._handle, index, cosine.data_ptr(), sine.data_ptr(), cosine.shape[0])

    def bind_buffer(self, index: int, address: int, stride: int) -> None:
        """Have the rows of a buffer be memory of the caller's, `stride` elements apart, until it is bound again."""
        self._library.hfp_program_bind_buffer(self._handle, index, address, stride)

    def run(self, step: abi.Step, ops: OpRange) -> None:
        """Run some operations of a step. The GIL is released meanwhile.

        Raises:
            NativeKernelError: the step's arrays are not what the operations can work on; nothing was computed.
        """
        step.first_op, step.end_op = ops.first, ops.end
        status = self._library.hfp_program_run(self._handle, ctypes.byref(step))
        if status:
            raise NativeKernelError(f"the step cannot run: {abi.STATUS_MESSAGES[status]}")

    def buffer(self, index: int, rows: int, width: int) -> torch.Tensor:
        """A buffer's memory as [rows, width], after a step of at least `rows` rows ran."""
        stride = ctypes.c_int64()
        address = self._library.hfp_program_buffer(self._handle, index, ctypes.byref(stride))
        num_bytes = rows * stride.value * self._dtype.itemsize
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=self._dtype).view(rows, stride.value)[:, :width]


def _label(kind: OpKind, struct: ctypes.Structure) -> str:
    name = kind.name.lower()
    return f"{name} to {struct.weight.columns}" if kind == OpKind.PRODUCT else name
