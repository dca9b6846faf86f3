"""The formats that hfpaged loads itself, as functions that write a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from quantization import checkpoints as make
from quantization.checkpoints import Packed, Saved, save, tiny_llama
from transformers import PreTrainedModel

MIXED_FP8 = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")


def modelopt_nvfp4(folder: Path, model: PreTrainedModel) -> Saved:
    return save(folder, model, make.nvfp4_modelopt, make.modelopt_config("NVFP4"))


def modelopt_nvfp4_weight_only(folder: Path, model: PreTrainedModel) -> Saved:
    return save(
        folder, model, lambda *pair: make.nvfp4_modelopt(*pair, with_input=False), make.modelopt_config("W4A16_NVFP4")
    )


def modelopt_nvfp4_file_only(folder: Path, model: PreTrainedModel) -> Saved:
    files = {"hf_quant_config.json": make.modelopt_file("NVFP4", group_size=16)}
    return save(folder, model, make.nvfp4_modelopt, None, files=files)


def modelopt_fp8(folder: Path, model: PreTrainedModel) -> Saved:
    files = {"hf_quant_config.json": make.modelopt_file("FP8")}
    return save(folder, model, make.fp8_tensor, make.modelopt_config("FP8"), files=files)


def modelopt_fp8_file_only(folder: Path, model: PreTrainedModel) -> Saved:
    return save(folder, model, make.fp8_tensor, None, files={"hf_quant_config.json": make.modelopt_file("FP8")})


def modelopt_mixed(folder: Path, model: PreTrainedModel) -> Saved:
    """FP8 attention, NVFP4 MLPs."""
    layers = {}
    for name in make.linears(model):
        is_fp8 = name.endswith(MIXED_FP8)
        layers[name] = {"quant_algo": "FP8"} if is_fp8 else {"quant_algo": "NVFP4", "group_size": 16}

    def pack(name: str, weight: torch.Tensor) -> Packed:
        return make.fp8_tensor(name, weight) if name.endswith(MIXED_FP8) else make.nvfp4_modelopt(name, weight)

    return save(folder, model, pack, make.modelopt_config("MIXED_PRECISION", quantized_layers=layers))


def compressed_nvfp4(folder: Path, model: PreTrainedModel) -> Saved:
    config = make.compressed_config("nvfp4-pack-quantized", make.NVFP4_ARGS)
    return save(folder, model, make.nvfp4_compressed, config)


def compressed_nvfp4_activations(folder: Path, model: PreTrainedModel) -> Saved:
    config = make.compressed_config("nvfp4-pack-quantized", make.NVFP4_ARGS, make.NVFP4_INPUT)
    return save(folder, model, lambda *pair: make.nvfp4_compressed(*pair, with_input=True), config)


def compressed_mxfp4(folder: Path, model: PreTrainedModel) -> Saved:
    return save(folder, model, make.mxfp4_compressed, make.compressed_config("mxfp4-pack-quantized", make.MXFP4_ARGS))


def compressed_int4(folder: Path, model: PreTrainedModel) -> Saved:
    return save(folder, model, make.int4_compressed, make.compressed_config("pack-quantized", make.INT4_ARGS))


def ragged_fp8(folder: Path, model: PreTrainedModel) -> Saved:
    """192 and 576 outputs are no whole number of blocks of 128."""
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    return save(folder, tiny_llama(192, 576), make.fp8_blocks, config)


Writer = Callable[[Path, PreTrainedModel], Saved]
WEIGHT_ONLY: tuple[Writer, ...] = (
    modelopt_nvfp4_weight_only, compressed_nvfp4, compressed_mxfp4, compressed_int4, ragged_fp8,
)  # fmt: skip
WITH_ACTIVATIONS: tuple[Writer, ...] = (
    modelopt_nvfp4, modelopt_nvfp4_file_only, modelopt_fp8, modelopt_fp8_file_only, modelopt_mixed,
    compressed_nvfp4_activations,
)  # fmt: skip
ALL = WEIGHT_ONLY + WITH_ACTIVATIONS
