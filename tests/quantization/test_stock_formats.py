"""Checkpoints that Transformers and its libraries load: used as they come, and no worse patched than unpatched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantization import checkpoints as make
from quantization.checkpoints import PROMPT, Packed, save
from quantization.test_loading import distance, logits
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, PreTrainedModel

import hfpaged


def last_logits_patched(model: PreTrainedModel) -> torch.Tensor:
    """Logits behind the prompt, from the engine."""
    ids = torch.tensor([PROMPT])
    with hfpaged.patched(model, num_blocks=32):
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        stats = hfpaged.engine(model).stats()
        assert stats["steps"] > 0 and not stats["fallbacks"]
    return output.logits[0][0].float()


def assert_no_worse_patched(model: PreTrainedModel, dense: PreTrainedModel) -> None:
    expected = logits(dense)[0, -1]
    patched = distance(last_logits_patched(model), expected)
    unpatched = distance(logits(model)[0, -1], expected)
    assert patched <= 1.1 * unpatched + 1e-3
    assert unpatched < 0.15  # else the test has written the layout wrong


def channel(weight: torch.Tensor, largest: float) -> torch.Tensor:
    return (weight.abs().amax(1, keepdim=True) / largest).bfloat16().float()


def int8_channel(name: str, weight: torch.Tensor) -> Packed:
    scale = channel(weight, 127)
    codes = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    return Packed({"weight": codes, "weight_scale": scale.bfloat16()}, codes.float() * scale)


def fp8_channel(name: str, weight: torch.Tensor) -> Packed:
    scale = channel(weight, 448)
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return Packed({"weight": codes, "weight_scale": scale.bfloat16()}, codes.float() * scale)


COMPRESSED = {
    "int8": (int8_channel, "int-quantized", make.args("int", 8, "channel", None)),
    "fp8": (fp8_channel, "float-quantized", make.args("float", 8, "channel", None)),
}


@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_tensors(tmp_path, llama, kind):
    pytest.importorskip("compressed_tensors")
    pack, form, weights = COMPRESSED[kind]
    saved = save(tmp_path, llama, pack, make.compressed_config(form, weights))
    assert_no_worse_patched(hfpaged.from_pretrained(saved.folder, dtype=torch.float32), saved.dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_block_fp8(tmp_path, dtype):
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    saved = save(tmp_path, make.tiny_llama(256, 256), make.fp8_blocks, config)
    assert_no_worse_patched(hfpaged.from_pretrained(saved.folder, dtype=dtype), saved.dense)


def gptq(name: str, weight: torch.Tensor, group: int = 32) -> Packed:
    blocks = weight.unflatten(1, (-1, group))
    scale = (blocks.abs().amax(-1) / 7).half().float()
    codes = ((blocks / scale[..., None]).round() + 8).clamp(0, 15)
    dense = ((codes - 8) * scale[..., None]).flatten(1)
    words = make.pack_nibbles(codes.to(torch.uint8).flatten(1)).view(torch.int32).t()
    zeros = torch.full((weight.shape[1] // group, weight.shape[0] // 2), 7 * 17, dtype=torch.uint8).view(torch.int32)
    tensors = {"qweight": words, "qzeros": zeros, "scales": scale.t().half()}
    return Packed(tensors | {"g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group}, dense)


@pytest.mark.slow  # the package compiles its kernels at the first use
def test_gptq(tmp_path, llama):
    for package in ("optimum", "gptqmodel"):
        pytest.importorskip(package)
    config = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
        "checkpoint_format": "gptq",
    }  # fmt: skip
    saved = save(tmp_path, llama, gptq, config)
    assert_no_worse_patched(hfpaged.from_pretrained(saved.folder, dtype=torch.bfloat16), saved.dense)


def awq(name: str, weight: torch.Tensor, group: int = 32) -> Packed:
    packed = gptq(name, weight, group)
    scale = packed.tensors["scales"]
    codes = ((weight / scale.t().float().repeat_interleave(group, 1)).round() + 8).clamp(0, 15).to(torch.uint8)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    words = make.pack_nibbles(codes.t().unflatten(1, (-1, 8))[..., order].flatten(1)).view(torch.int32)
    zeros = torch.full((weight.shape[1] // group, weight.shape[0] // 2), 8 * 17, dtype=torch.uint8).view(torch.int32)
    return Packed({"qweight": words, "qzeros": zeros, "scales": scale}, packed.weight)


@pytest.mark.slow  # the package compiles its kernels at the first use
def test_awq(tmp_path, llama):
    pytest.importorskip("gptqmodel")
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    saved = save(tmp_path, llama, awq, config)
    assert_no_worse_patched(hfpaged.from_pretrained(saved.folder, dtype=torch.bfloat16), saved.dense)


def test_bitsandbytes(llama, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    llama.save_pretrained(tmp_path / "dense")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", dtype=torch.bfloat16, quantization_config=config
    )
    quantized.save_pretrained(tmp_path / "nf4")
    model = hfpaged.from_pretrained(tmp_path / "nf4", dtype=torch.bfloat16)
    dense = make.tiny_like(llama)
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit":
            import bitsandbytes

            weight = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            dense.get_submodule(name).weight.data.copy_(weight.reshape(module.out_features, -1))
    assert_no_worse_patched(model, dense)


def test_torchao(llama, tmp_path):
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    llama.save_pretrained(tmp_path / "dense")
    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = hfpaged.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16, quantization_config=config)
    dense = make.tiny_like(llama)
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and hasattr(module.weight, "dequantize") and name != "lm_head":
            dense.get_submodule(name).weight.data.copy_(module.weight.dequantize().float())
    assert_no_worse_patched(model, dense)


def gpt_oss() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=256, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        max_position_embeddings=256, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.08)
            parameter.copy_(parameter.bfloat16())
    return model


def mxfp4_experts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks, scales and dequantized weight of experts [E, in, out], stored as [E, out, in / 32, 16]."""
    experts = [make.mxfp4_compressed("", one.t()) for one in weight]
    blocks = torch.stack([one.tensors["weight_packed"].unflatten(1, (-1, 16)) for one in experts])
    scales = torch.stack([one.tensors["weight_scale"] for one in experts])
    return blocks, scales, torch.stack([one.weight.t() for one in experts])


def test_mxfp4_experts_of_gpt_oss(tmp_path: Path):
    from safetensors.torch import save_file

    model = gpt_oss()
    dense = make.tiny_like(model)
    tensors: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")) and value.dim() == 3:
            blocks, scales, weight = mxfp4_experts(value)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            dense.get_parameter(name).data.copy_(weight)
        else:
            tensors[name] = value.bfloat16()
    config = {**model.config.to_dict(), "architectures": ["GptOssForCausalLM"], "dtype": "bfloat16"}
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(
        {k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    assert_no_worse_patched(hfpaged.from_pretrained(tmp_path, dtype=torch.float32), dense)


def test_gguf(tmp_path, llama):
    gguf = pytest.importorskip("gguf")
    import numpy as np

    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    config = llama.config
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    dense = make.tiny_like(llama)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, parameter in dense.named_parameters():
        module = name.removesuffix(".weight")
        layer = f"blk.{module.split('.')[2]}." if module.startswith("model.layers") else ""
        stored = layer + names[module.split(".", 3)[3] if layer else module] + ".weight"
        value = parameter.data.clone()
        quantized = gguf.GGMLQuantizationType.Q8_0 if value.dim() == 2 and layer else gguf.GGMLQuantizationType.F32
        content = gguf.quants.quantize(value.numpy(), quantized)
        rounded = torch.from_numpy(np.array(gguf.quants.dequantize(content, quantized))).reshape(value.shape)
        parameter.data.copy_(rounded)
        if names.get(module.split(".", 3)[-1]) in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if "q_proj" in module else config.num_key_value_heads
            value = value.reshape(heads, 2, -1, value.shape[1]).transpose(1, 2).reshape(value.shape)
            content = gguf.quants.quantize(np.ascontiguousarray(value.numpy()), quantized)
        writer.add_tensor(stored, content, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    try:
        model = hfpaged.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    except (KeyError, ValueError, OSError) as error:
        pytest.fail(f"the test wrote no valid GGUF: {error}")
    assert_no_worse_patched(model, dense)
