"""The structs and entry points of csrc/leaf.h, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_int32, c_int64, c_void_p

from hfpaged.program import abi as program_abi
from hfpaged.program.abi import HeadOp, NormWeights, PackedWeight


class LeafInput(ctypes.Structure):
    """HfpLeafInput: the rows that a module reads."""

    _fields_ = [("data", c_void_p), ("rows", c_int64), *((name, c_int32) for name in ("width", "dtype", "threads"))]


class LeafLinear(ctypes.Structure):
    """HfpLeafLinear: one linear module and where its output goes."""

    _fields_ = [("weight", PackedWeight), ("out", c_void_p), ("out_width", c_int32)]


class LeafLinears(ctypes.Structure):
    """HfpLeafLinears: linear modules that read the same rows."""

    _fields_ = [("input", LeafInput), ("linears", POINTER(LeafLinear)), ("count", c_int32)]


class LeafMlp(ctypes.Structure):
    """HfpLeafMlp: a gated or plain MLP."""

    _fields_ = [
        ("input", LeafInput),
        ("inner", PackedWeight),
        ("down", LeafLinear),
        *((name, c_int32) for name in ("inner_width", "gated", "activation")),
    ]


class LeafNorm(ctypes.Structure):
    """HfpLeafNorm: a normalization."""

    _fields_ = [("input", LeafInput), ("weights", NormWeights), ("out", c_void_p)]


class LeafHead(ctypes.Structure):
    """HfpLeafHead: the argmax of a head."""

    _fields_ = [("input", LeafInput), ("head", HeadOp), ("argmax", c_void_p)]


class LeafRotation(ctypes.Structure):
    """HfpLeafRotation: queries and keys to be rotated."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "key", "cosine", "sine")),
        ("tokens", c_int64),
        *((name, c_int32) for name in ("heads", "kv_heads", "dim", "rotary_dim")),
        *((name, c_int32) for name in ("style", "round_products", "dtype", "threads")),
    ]


# A bare address converts faster than a typed pointer, and these are called a hundred times a step.
_SIGNATURES = {
    "hfp_leaf_use_threads": (None, c_int32),
    "hfp_leaf_linears": (None, c_void_p),
    "hfp_leaf_mlp": (c_int, c_void_p),
    "hfp_leaf_norm": (None, c_void_p),
    "hfp_leaf_head": (c_int, c_void_p),
    "hfp_leaf_rotate": (None, c_void_p),
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give the entry points used here their argument types. Returns `library`."""
    for name, (result, argument) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, [argument]
    return program_abi.declare(library)
