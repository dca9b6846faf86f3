"""Every format that hfpaged loads: logits are those of the dense model with the dequantized weights."""

from __future__ import annotations

import json

import pytest
import torch
from quantization import checkpoints as make
from quantization import formats
from quantization.checkpoints import PROMPT, Saved, kv_scales, save
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

import hfpaged
from hfpaged.errors import CheckpointError, ConfigError
from hfpaged.quantization.packed_linear import EmulatedLinear, PackedLinear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits.float()


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


def load(saved: Saved, dtype: torch.dtype = torch.float32, **options: object) -> PreTrainedModel:
    return hfpaged.from_pretrained(saved.folder, dtype=dtype, **options)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("write", formats.ALL, ids=lambda write: write.__name__)
def test_logits_are_those_of_the_dequantized_weights(tmp_path, llama, write, dtype):
    saved = write(tmp_path, llama)
    model = load(saved, dtype, activations="weight-only")
    assert model.dtype == dtype
    assert distance(logits(model), logits(saved.dense)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("write", formats.ALL, ids=lambda write: write.__name__)
def test_every_weight_is_the_one_that_was_stored(tmp_path, llama, write):
    saved = write(tmp_path, llama)
    model = load(saved)
    for name, packed in saved.packed.items():
        module = model.get_submodule(name)
        weight = module.record().dequantize() if isinstance(module, PackedLinear) else module.weight
        assert torch.allclose(weight, packed.weight, rtol=1e-6, atol=0), name


def nvfp4_input(x: torch.Tensor, scale: float) -> torch.Tensor:
    """What a W4A4 kernel multiplies, written by search over all numbers of the format."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = x.float().unflatten(-1, (-1, 16))
    step = (blocks.abs().amax(-1, keepdim=True) / 6 / scale).to(torch.float8_e4m3fn).float() * scale
    nearest = (blocks.abs() / step.clamp_min(1e-30)).unsqueeze(-1).sub(grid).abs().argmin(-1)
    return (grid[nearest] * blocks.sign() * step).flatten(-2).to(x.dtype)


def fp8_input(x: torch.Tensor, scale: float) -> torch.Tensor:
    return ((x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


EMULATIONS = {
    "modelopt_nvfp4": lambda x: nvfp4_input(x, 4.0 / (6 * 448)),
    "compressed_nvfp4_activations": lambda x: nvfp4_input(x, 1 / (6 * 448 / 4.0)),
    "modelopt_fp8": lambda x: fp8_input(x, 4.0 / 448),
}


@pytest.mark.parametrize("name", EMULATIONS)
def test_quantized_inputs_are_emulated_as_the_checkpoint_says(tmp_path, llama, name):
    saved = getattr(formats, name)(tmp_path, llama)
    emulate = EMULATIONS[name]
    for linear in saved.packed:
        module = saved.dense.get_submodule(linear)
        module.forward = lambda x, module=module: functional.linear(emulate(x), module.weight)
    model = load(saved)
    assert distance(logits(model), logits(saved.dense)) <= 1e-3
    # It matters: without the emulation the result is another one.
    weight_only = load(saved, activations="weight-only")
    assert distance(logits(weight_only), logits(saved.dense)) > 2e-2


def test_mixed_recipes_are_resolved_for_each_module(tmp_path, llama):
    model = load(formats.modelopt_mixed(tmp_path, llama))
    layer = model.model.layers[0]
    assert type(layer.self_attn.q_proj) is EmulatedLinear and layer.self_attn.q_proj.activation.format == "fp8"
    assert type(layer.mlp.up_proj) is PackedLinear and layer.mlp.up_proj.activation.format == "nvfp4"
    assert type(model.lm_head) is nn.Linear


def test_plain_from_pretrained_loads_modelopt_too(tmp_path, llama):
    saved = formats.modelopt_nvfp4(tmp_path, llama)
    plain = AutoModelForCausalLM.from_pretrained(saved.folder, dtype=torch.float32)
    assert torch.equal(logits(plain), logits(load(saved)))


def test_packed_weights_survive_casts(tmp_path, llama):
    saved = formats.compressed_nvfp4(tmp_path, llama)
    model = load(saved, torch.bfloat16)
    assert distance(logits(nn.Module.float(model)), logits(saved.dense)) <= 1e-5


def test_scales_of_keys_and_values_are_kept(tmp_path, llama):
    extra = {
        "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.5),
        "model.layers.1.self_attn.v_scale": torch.tensor([0.25]),
    }
    config = make.modelopt_config("FP8", kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False})
    model = load(save(tmp_path, llama, make.fp8_tensor, config, extra))
    assert kv_scales(model) == {name: float(value) for name, value in extra.items()}


def test_a_bias_is_kept(tmp_path, llama):
    bias = torch.linspace(-1, 1, 64)
    saved = save(tmp_path, llama, make.nvfp4_modelopt, make.modelopt_config("NVFP4"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in saved.packed:
        if "self_attn" in name:
            tensors[f"{name}.bias"] = bias[: tensors[f"{name}.weight"].shape[0]].bfloat16()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    projection = load(saved).model.layers[0].self_attn.q_proj
    assert torch.equal(projection.bias, bias.bfloat16().float())
    assert torch.equal(projection(torch.zeros(1, 64)), projection.bias[None])


def test_unknown_choice_of_activations_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="emulate, weight-only"):
        hfpaged.from_pretrained(tmp_path, activations="fp4")


# ---- refusals ----

LAYER = "model.layers.1.mlp.up_proj"
BROKEN = {
    "missing scale": ({f"{LAYER}.weight_scale": None}, "weight_scale is missing"),
    "missing global scale": ({f"{LAYER}.weight_scale_2": None}, "weight_scale_2 is missing"),
    "missing weight": ({f"{LAYER}.weight": None}, "weight is missing"),
    "unexpected": ({f"{LAYER}.weight_zero_point": torch.zeros(1)}, "weight_zero_point is unexpected"),
    "stray": ({"model.layers.7.mlp.up_proj.weight_scale": torch.zeros(1)}, "belongs to no module"),
    "wrong dtype": ({f"{LAYER}.weight_scale": torch.zeros(128, 4)}, "weight_scale is F32, expected F8_E4M3"),
    "wrong shape": ({f"{LAYER}.weight": torch.zeros(128, 16, dtype=torch.uint8)}, r"shape \[128, 16\], expected"),
    "not finite": ({f"{LAYER}.weight_scale_2": torch.tensor(float("nan"))}, "weight_scale_2 is not finite"),
    "not positive": ({f"{LAYER}.weight_scale_2": torch.tensor(0.0)}, "expected a positive number"),
    "reciprocal": ({f"{LAYER}.weight_scale_2": torch.tensor(8000.0)}, "stored as its reciprocal"),
    "not finite scales": (
        {f"{LAYER}.weight_scale": torch.full((128, 4), float("nan")).to(torch.float8_e4m3fn)},
        "weight_scale is not finite",
    ),
}


@pytest.mark.parametrize("extra, message", BROKEN.values(), ids=BROKEN)
def test_a_broken_tensor_is_an_error_that_names_it(tmp_path, llama, extra, message):
    saved = save(tmp_path, llama, make.nvfp4_modelopt, make.modelopt_config("NVFP4"), extra)
    for loader in (hfpaged, AutoModelForCausalLM):
        with pytest.raises(CheckpointError, match=message) as caught:
            loader.from_pretrained(saved.folder, dtype=torch.float32)
        assert LAYER in str(caught.value) or "model.layers.7" in str(caught.value)


def test_configs_that_contradict_each_other_are_refused(tmp_path, llama):
    saved = save(
        tmp_path, llama, make.nvfp4_modelopt, make.modelopt_config("NVFP4"),
        files={"hf_quant_config.json": make.modelopt_file("FP8")},
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="disagree on quant_algo: NVFP4 and FP8"):
        load(saved)


def test_a_config_that_contradicts_the_tensors_is_refused(tmp_path, llama):
    saved = save(tmp_path / "algorithm", llama, make.nvfp4_modelopt, make.modelopt_config("FP8"))
    with pytest.raises(CheckpointError, match="is U8, expected F8_E4M3"):
        load(saved)
    ignoring = make.modelopt_config("NVFP4") | {"ignore": ["lm_head", "*mlp.up_proj"]}
    saved = save(tmp_path / "ignored", llama, make.nvfp4_modelopt, ignoring)
    with pytest.raises(CheckpointError, match=r"the config leaves .*up_proj out"):
        load(saved)


def test_an_algorithm_that_is_not_supported_is_refused_by_name(tmp_path, llama):
    saved = save(tmp_path, llama, make.nvfp4_modelopt, make.modelopt_config("NVFP4_AWQ"))
    with pytest.raises(CheckpointError, match="NVFP4_AWQ"):
        load(saved)
