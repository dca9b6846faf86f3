"""The structs and entry points of csrc/program.h and csrc/gemm_pack.cpp, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

import torch

from hfpaged.native.library import Batch


class RowSet(IntEnum):
    """What the rows of a buffer are."""

    TOKENS = 0
    SAMPLES = 1
    EXPERT_PAIRS = 2


class OpKind(IntEnum):
    """Operation of a program; each has its struct below."""

    EMBED = 0
    NORM = 1
    PRODUCT = 2
    ROTATE_AND_STORE = 3
    ATTENTION = 4
    HEAD = 5
    ROUTE = 6
    ORDER_PAIRS = 7
    GATHER_PAIRS = 8
    EXPERTS = 9
    COMBINE = 10
    GATHER_SAMPLES = 11


class NormKind(IntEnum):
    """Rounding convention of a normalization. See program.h for the formulas."""

    RMS_ROUNDED_THEN_SCALED = 0
    RMS_SCALED_THEN_ROUNDED = 1
    LAYER_NORM = 2


class Activation(IntEnum):
    """Activation function of an MLP."""

    NONE = 0
    SILU = 1
    GELU_ERF = 2
    GELU_TANH = 3
    RELU = 4


class Epilogue(IntEnum):
    """What a matrix product does with its result. See program.h for the formulas."""

    STORE = 0
    GATED = 1
    RESIDUAL = 2


class RotaryStyle(IntEnum):
    """Which dimensions of a head rotate together."""

    NONE = 0
    HALVES = 1
    INTERLEAVED = 2


class PackedWeight(ctypes.Structure):
    """A packed weight matrix; `columns` and `depth` as in csrc/gemm.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("panels", "strips", "bias")),
        *((name, c_int32) for name in ("columns", "depth")),
    ]


class NormWeights(ctypes.Structure):
    """fp32 gamma and beta of one normalization."""

    _fields_ = [("gamma", c_void_p), ("beta", c_void_p), ("kind", c_int32), ("epsilon", c_float)]


class AttentionShape(ctypes.Structure):
    """Heads and dimensions of one attention layer."""

    _fields_ = [(name, c_int32) for name in ("layer", "heads", "kv_heads", "key_dim", "value_dim")]


class EmbedOp(ctypes.Structure):
    """OpKind.EMBED."""

    _fields_ = [("table", c_void_p), ("vocab", c_int64), ("width", c_int32), ("out", c_int32), ("scale", c_float)]


class NormOp(ctypes.Structure):
    """OpKind.NORM."""

    _fields_ = [
        ("weights", NormWeights),
        *((name, c_int32) for name in ("input", "out", "in_column", "out_column", "groups", "width", "residual")),
        ("multiplier", c_float),
    ]


class ProductOp(ctypes.Structure):
    """OpKind.PRODUCT."""

    _fields_ = [
        ("weight", PackedWeight),
        *((name, c_int32) for name in ("input", "out", "out_width", "epilogue", "activation")),
        ("multiplier", c_float),
        ("other", c_int32),
    ]


class RotateAndStoreOp(ctypes.Structure):
    """OpKind.ROTATE_AND_STORE."""

    _fields_ = [
        ("shape", AttentionShape),
        ("query_norm", NormWeights),
        ("key_norm", NormWeights),
        *((name, c_int32) for name in ("qkv", "rotary_dim", "style", "round_products", "table")),
    ]


class AttentionOp(ctypes.Structure):
    """OpKind.ATTENTION."""

    _fields_ = [
        ("shape", AttentionShape),
        *((name, c_int32) for name in ("qkv", "out", "window")),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
    ]


class HeadScreen(ctypes.Structure):
    """A head's weight in 8 bits; null pointers: there is no screen."""

    _fields_ = [
        *((name, c_void_p) for name in ("codes", "scales", "lengths", "errors")),
        *((name, c_int32) for name in ("columns", "quads")),
    ]


class HeadOp(ctypes.Structure):
    """OpKind.HEAD."""

    _fields_ = [
        ("weight", PackedWeight),
        ("screen", HeadScreen),
        ("input", c_int32),
        ("vocab", c_int32),
        *((name, c_float) for name in ("multiplier", "divisor", "softcap")),
    ]


class RouteOp(ctypes.Structure):
    """OpKind.ROUTE."""

    _fields_ = [(name, c_int32) for name in ("logits", "experts", "chosen", "normalize", "round_weights")]


class OrderPairsOp(ctypes.Structure):
    """OpKind.ORDER_PAIRS."""

    _fields_ = [(name, c_int32) for name in ("logits", "experts", "chosen")]


class GatherPairsOp(ctypes.Structure):
    """OpKind.GATHER_PAIRS."""

    _fields_ = [(name, c_int32) for name in ("input", "out", "width", "chosen")]


class ExpertsOp(ctypes.Structure):
    """OpKind.EXPERTS."""

    _fields_ = [
        ("weights", POINTER(PackedWeight)),
        *((name, c_int32) for name in ("experts", "input", "out", "out_width", "epilogue", "activation")),
    ]


class CombineOp(ctypes.Structure):
    """OpKind.COMBINE."""

    _fields_ = [
        *((name, c_int32) for name in ("input", "out", "width", "chosen", "residual")),
        ("multiplier", c_float),
    ]


class GatherSamplesOp(ctypes.Structure):
    """OpKind.GATHER_SAMPLES."""

    _fields_ = [(name, c_int32) for name in ("input", "out", "width")]


class Step(ctypes.Structure):
    """One step; the pointers are the arrays of a StepArrays, or null where no operation uses them."""

    _fields_ = [
        ("batch", Batch),
        ("tokens", c_int64),
        ("samples", c_int64),
        *((name, c_void_p) for name in ("token_ids", "positions", "key_cache", "value_cache")),
        *((name, c_void_p) for name in ("sample_rows", "argmax", "logits")),
        *((name, c_int32) for name in ("num_blocks", "first_op", "end_op", "threads", "by_rows")),
        ("batch_number", c_int64),
        ("op_seconds", c_void_p),
        ("cpu_seconds", c_double),
    ]


STATUS_MESSAGES = {
    1: "the step has no tokens, no thread, or names operations that do not exist",
    2: "a token id is outside the embedding table",
    3: "a position is outside the rotary table",
    4: "a sampled row is not a token of the step",
    5: "out of memory for the activations",
    6: "its lengths, block tables or slots do not fit the KV cache",
}
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STEP_BYTES = 256  # one depth step of a panel: 64 words

_SIGNATURES = {
    "hfp_use_threads": (None, [c_int32]),
    "hfp_program_create": (c_void_p, [c_int32]),
    "hfp_program_destroy": (None, [c_void_p]),
    "hfp_program_add_buffer": (c_int32, [c_void_p, c_int32, c_int32]),
    "hfp_program_bind_buffer": (None, [c_void_p, c_int32, c_void_p, c_int64]),
    "hfp_program_buffer": (c_void_p, [c_void_p, c_int32, POINTER(c_int64)]),
    "hfp_program_add_op": (c_int32, [c_void_p, c_int32, c_void_p, c_int64]),
    "hfp_program_replace_op": (c_int32, [c_void_p, c_int32, c_int32, c_void_p, c_int64]),
    "hfp_program_set_table": (None, [c_void_p, c_int32, c_void_p, c_void_p, c_int64]),
    "hfp_program_run": (c_int32, [c_void_p, POINTER(Step)]),
    "hfp_panels_allocate": (c_void_p, [c_int64]),
    "hfp_panels_free": (None, [c_void_p, c_int64]),
    "hfp_panels_pack": (
        None,
        [c_void_p, c_int32, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int32],
    ),
    "hfp_screen_rows": (c_int64, []),
    "hfp_screen_fill": (None, [POINTER(HeadScreen), POINTER(PackedWeight), c_int32, c_int32]),
    "hfp_panels_unpack": (None, [c_void_p, c_int32, c_int64, c_int64, c_void_p, c_void_p, c_int32]),
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give the entry points used here their argument types. Returns `library`."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
