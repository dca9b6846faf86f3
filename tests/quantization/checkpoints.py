"""Small quantized checkpoints, written by hand in the layouts of the tools, with the dense weights they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hfpaged.quantization.codes import e8m0_values, pack_nibbles, to_e2m1
from hfpaged.quantization.disk_layout import KV_SCALES

PROJECTIONS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
# Value of each 4-bit code: E2M1 has its sign in bit 3, int4 is stored with an offset of 8.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4_VALUES = tuple(float(code - 8) for code in range(16))
PROMPT = [(i * 37 + 11) % 256 for i in range(12)]
Tensors = dict[str, torch.Tensor]


@dataclass
class Packed:
    """Tensors of one layer under the last parts of their names, and the weight they stand for in fp32."""

    tensors: Tensors
    weight: torch.Tensor


@dataclass
class Saved:
    """A checkpoint on disk, and the dense fp32 model that holds its dequantized weights."""

    folder: Path
    dense: PreTrainedModel
    packed: dict[str, Packed] = field(default_factory=dict)


def tiny_llama(hidden: int = 64, inner: int = 128, layers: int = 2, seed: int = 0) -> PreTrainedModel:
    """A random Llama in fp32 whose weights are exact in bfloat16."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=hidden // 4, vocab_size=256, max_position_embeddings=256, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_((noise * 0.08 if parameter.dim() == 2 else 1 + 0.1 * noise).bfloat16())
    return model


def linears(model: PreTrainedModel) -> list[str]:
    """Names of the projections of all layers."""
    return [f"model.layers.{i}.{name}" for i in range(model.config.num_hidden_layers) for name in PROJECTIONS]


def kv_scales(model: PreTrainedModel) -> dict[str, float]:
    """The scales of keys and values that a model holds, by the names that they have in its checkpoint."""
    return {name: float(buffer) for name, buffer in model.named_buffers() if name.rpartition(".")[2] in KV_SCALES}


def save(
    folder: Path,
    model: PreTrainedModel,
    pack: Callable[[str, torch.Tensor], Packed],
    quantization: dict[str, Any] | None,
    extra: Tensors | None = None,
    files: dict[str, Any] | None = None,
    names: list[str] | None = None,
) -> Saved:
    """Write `model` with the linear layers `names` (all) packed; everything else in bfloat16.

    Args:
        extra: tensors to add, or with None as value to leave out.
        files: further JSON files by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = dict(model.state_dict())
    packed = {name: pack(name, state.pop(f"{name}.weight")) for name in names or linears(model)}
    tensors = {name: value.bfloat16() for name, value in state.items()}
    for name, one in packed.items():
        tensors |= {f"{name}.{leaf}": value for leaf, value in one.tensors.items()}
    for name, value in (extra or {}).items():
        tensors[name] = value
        if value is None:
            del tensors[name]
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    if quantization is not None:
        config["quantization_config"] = quantization
    for name, content in {"config.json": config, **(files or {})}.items():
        (folder / name).write_text(json.dumps(content))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    dense = tiny_like(model)
    for name, one in packed.items():
        dense.get_submodule(name).weight.data.copy_(one.weight)
    return Saved(folder, dense, packed)


def tiny_like(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the same weights."""
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    return twin


# ---- packing one weight ----


def code_values(codes: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    """fp32 value of each code, by a table."""
    return torch.tensor(values)[codes.long()]


def nvfp4_codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed codes, E4M3 scales, global multiplier, dequantized weight) of a weight."""
    blocks = weight.float().unflatten(1, (-1, 16))
    top = weight.abs().amax() / (6 * 448)
    scales = (blocks.abs().amax(-1) / 6 / top).to(torch.float8_e4m3fn)
    step = (scales.float() * top)[..., None]
    codes = to_e2m1(blocks / step.clamp_min(1e-30))
    dense = (code_values(codes, E2M1_VALUES) * step).flatten(1)
    return pack_nibbles(codes.flatten(1)), scales, top.reshape(()), dense


def nvfp4_modelopt(name: str, weight: torch.Tensor, with_input: bool = True) -> Packed:
    codes, scales, top, dense = nvfp4_codes(weight)
    tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": top}
    if with_input:
        tensors["input_scale"] = torch.tensor(4.0 / (6 * 448))
    return Packed(tensors, dense)


def nvfp4_compressed(name: str, weight: torch.Tensor, with_input: bool = False) -> Packed:
    codes, scales, top, dense = nvfp4_codes(weight)
    divisor = (1 / top).reshape(1)
    dense = (dense / top) * (1.0 / divisor)
    tensors = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": divisor}
    if with_input:
        tensors["input_global_scale"] = torch.tensor([6 * 448 / 4.0])
    return Packed(tensors, dense)


def mxfp4_compressed(name: str, weight: torch.Tensor) -> Packed:
    blocks = weight.float().unflatten(1, (-1, 32))
    exponents = (torch.floor(torch.log2(blocks.abs().amax(-1))) - 2 + 127).to(torch.uint8)
    step = e8m0_values(exponents)[..., None]
    codes = to_e2m1(blocks / step)
    dense = (code_values(codes, E2M1_VALUES) * step).flatten(1)
    return Packed({"weight_packed": pack_nibbles(codes.flatten(1)), "weight_scale": exponents}, dense)


def int4_compressed(name: str, weight: torch.Tensor, group: int = 32) -> Packed:
    blocks = weight.float().unflatten(1, (-1, group))
    scales = (blocks.abs().amax(-1) / 7).bfloat16()
    codes = ((blocks / scales.float()[..., None]).round().clamp(-8, 7) + 8).to(torch.uint8)
    dense = (code_values(codes, INT4_VALUES) * scales.float()[..., None]).flatten(1)
    words = pack_nibbles(codes.flatten(1)).view(torch.int32)
    shape = torch.tensor(weight.shape)
    return Packed({"weight_packed": words, "weight_scale": scales, "weight_shape": shape}, dense)


def fp8_tensor(name: str, weight: torch.Tensor, with_input: bool = True) -> Packed:
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scale.reshape(())}
    if with_input:
        tensors["input_scale"] = torch.tensor(4.0 / 448)
    return Packed(tensors, codes.float() * scale)


def fp8_blocks(name: str, weight: torch.Tensor, block: int = 128) -> Packed:
    rows, columns = ((torch.arange(size) // block) for size in weight.shape)
    grid = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            grid[i, j] = weight[rows == i][:, columns == j].abs().amax() / 448
    step = grid[rows][:, columns]
    codes = (weight / step).to(torch.float8_e4m3fn)
    return Packed({"weight": codes, "weight_scale_inv": grid}, codes.float() * step)


# ---- configs ----


def modelopt_config(algorithm: str, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **fields}


def modelopt_file(algorithm: str, **fields: Any) -> dict[str, Any]:
    part = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"], **fields}
    return {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": part}


def compressed_config(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **fields: Any) -> dict:
    group = {"targets": ["Linear"], "format": form, "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head"], "kv_cache_scheme": None, "config_groups": {"group_0": group}, **fields,
    }  # fmt: skip


def args(kind: str, bits: int, strategy: str, group: int | None, dynamic: Any = False, **fields: Any) -> dict[str, Any]:
    """Quantization arguments as compressed-tensors writes them."""
    return {
        "num_bits": bits, "type": kind, "strategy": strategy, "group_size": group, "symmetric": True,
        "dynamic": dynamic, **fields,
    }  # fmt: skip


NVFP4_ARGS = args("float", 4, "tensor_group", 16, scale_dtype="torch.float8_e4m3fn", zp_dtype="torch.float8_e4m3fn")
NVFP4_INPUT = {**NVFP4_ARGS, "dynamic": "local", "observer": "static_minmax"}
MXFP4_ARGS = args("float", 4, "group", 32, scale_dtype="torch.uint8", zp_dtype="torch.uint8")
INT4_ARGS = args("int", 4, "group", 32)
