"""Checkpoints made by the tools themselves: modelopt's export and compressed-tensors' compressors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantization import checkpoints as make
from quantization.checkpoints import PROMPT, Packed, save, tiny_llama
from quantization.test_loading import distance, logits
from safetensors.torch import load_file

import hfpaged
from hfpaged.quantization.packed_linear import PackedLinear

# Rounding normal numbers to the format, and a few outliers.
NOISE = {"NVFP4": 0.13, "FP8": 0.04}


def stored_weight(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Dequantized by the export's documentation, in loops."""
    codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"].float()
    if codes.dtype != torch.uint8:
        return codes.float() * scale
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    rows = []
    for row, factors in zip(codes, scale * tensors[f"{name}.weight_scale_2"].float(), strict=True):
        nibbles = [nibble for byte in row.tolist() for nibble in (byte & 15, byte >> 4)]
        row = [(-1 if nibble & 8 else 1) * values[nibble & 7] * factors[i // 16] for i, nibble in enumerate(nibbles)]
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.mark.parametrize("algorithm", NOISE)
def test_modelopt_export(tmp_path, algorithm):
    mtq = pytest.importorskip("modelopt.torch.quantization")
    from modelopt.torch.export import export_hf_checkpoint

    model = tiny_llama(layers=1)
    model.config.architectures = ["LlamaForCausalLM"]
    source = {name: value.clone() for name, value in model.state_dict().items()}
    recipe = {"NVFP4": mtq.NVFP4_DEFAULT_CFG, "FP8": mtq.FP8_DEFAULT_CFG}[algorithm]
    quantized = mtq.quantize(model.bfloat16(), recipe, lambda one: one(torch.tensor([PROMPT])))
    export_hf_checkpoint(quantized, export_dir=tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    loaded = hfpaged.from_pretrained(tmp_path, dtype=torch.float32)
    for name in make.linears(loaded):
        module = loaded.get_submodule(name)
        weight = module.record().dequantize() if isinstance(module, PackedLinear) else module.weight
        assert torch.allclose(weight, stored_weight(tensors, name), rtol=1e-5)
        assert distance(weight, source[f"{name}.weight"]) < NOISE[algorithm]
        assert module.activation.scale == pytest.approx(tensors[f"{name}.input_scale"].item())


FORMATS = {
    "nvfp4-pack-quantized": make.NVFP4_ARGS,
    "mxfp4-pack-quantized": make.MXFP4_ARGS,
    "pack-quantized": make.INT4_ARGS,
}


@pytest.mark.parametrize("form", FORMATS)
def test_compressed_tensors_compressor(tmp_path: Path, llama, form):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**FORMATS[form]))
    compressor = BaseCompressor.get_value_from_registry(form)
    ours = {
        "nvfp4-pack-quantized": make.nvfp4_compressed,
        "mxfp4-pack-quantized": make.mxfp4_compressed,
        "pack-quantized": make.int4_compressed,
    }[form]

    def pack(name: str, weight: torch.Tensor) -> Packed:
        by_hand = ours(name, weight)
        scale = by_hand.tensors["weight_scale"]
        state = {"weight": weight.clone(), "weight_scale": scale.float()}
        if scale.dtype == torch.uint8:
            state["weight_scale"] = torch.exp2(scale.float() - 127)
        if "weight_global_scale" in by_hand.tensors:
            state["weight_global_scale"] = by_hand.tensors["weight_global_scale"]
        compressed = compressor.compress(state, scheme)
        return Packed(compressed, compressor.decompress(dict(compressed), scheme)["weight"].float())

    saved = save(tmp_path, llama, pack, make.compressed_config(form, FORMATS[form]))
    model = hfpaged.from_pretrained(saved.folder, dtype=torch.float32)
    assert distance(logits(model), logits(saved.dense)) < 1e-2  # the library multiplies in bf16
    for name in saved.packed:
        assert distance(model.get_submodule(name).record().dequantize(), saved.packed[name].weight) < 1e-2
