"""NativeRotation: the rotary embedding of one attention layer's queries and keys."""

from __future__ import annotations

import ctypes

import torch

from hfpaged.program.abi import DTYPE_CODES
from hfpaged.program.description import Attention
from hfpaged.runtime.leaves.abi import LeafRotation
from hfpaged.runtime.leaves.angles import Angles
from hfpaged.runtime.leaves.kernels import LeafKernels


class NativeRotation:
    """Rotates in place, with the cosines and sines that the layer is given."""

    def __init__(self, kernels: LeafKernels, attention: Attention, dtype: torch.dtype, angles: Angles):
        self._kernels, self._angles = kernels, angles
        self._form = attention.rotation.form
        self._args = LeafRotation(
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            dim=attention.key_dim,
            rotary_dim=attention.rotation.width,
            style=attention.rotation.style,
            round_products=attention.rotation.round_products,
            dtype=DTYPE_CODES[dtype],
        )
        self._address = ctypes.addressof(self._args)
        self._run = kernels.library.hfp_leaf_rotate

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """query [T, heads, dim], key [T, kv_heads, dim], contiguous; cosines and sines for the T tokens."""
        cosine, sine = self._angles.tables(*position_embeddings, self._form)
        args = self._args
        args.query, args.key = query.data_ptr(), key.data_ptr()
        args.cosine, args.sine = cosine.data_ptr(), sine.data_ptr()
        args.tokens, args.threads = query.shape[0], self._kernels.threads
        self._run(self._address)
