"""`hfpaged quantize` and `hfpaged inspect`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from quantization import formats
from quantization.checkpoints import tiny_llama
from quantization.test_loading import distance, logits
from safetensors.torch import load_file

import hfpaged
from hfpaged.cli.main import main
from hfpaged.quantization import conversion
from hfpaged.quantization.inspection import Inspection
from hfpaged.quantization.packed_linear import PackedLinear
from hfpaged.quantization.packing import group_of, quantize_weight
from hfpaged.quantization.record import WeightFormat

FORMATS = ("nvfp4", "mxfp4", "int4")
# Root-mean-square error of rounding normal numbers, relative to them.
EXPECTED_ERROR = {"nvfp4": 0.10, "mxfp4": 0.13, "int4": 0.12}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    tiny_llama(hidden=128, inner=256).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", FORMATS)
def test_quantize_writes_a_checkpoint_that_loads_packed(source, tmp_path, capsys, form):
    target = tmp_path / form
    assert main(["quantize", str(source), str(target), "--format", form]) == 0
    printed = capsys.readouterr().out
    error = float(printed.split("relative to the source: ")[1].split(",")[0])
    before, after = (sum(file.stat().st_size for file in one.glob("*.safetensors")) for one in (source, target))
    assert f"{after / 2**20:.1f} MiB instead of {before / 2**20:.1f} MiB" in printed and after < before
    assert error == pytest.approx(EXPECTED_ERROR[form], abs=0.04)
    model = hfpaged.from_pretrained(target, dtype=torch.float32)
    dense = hfpaged.from_pretrained(source, dtype=torch.float32)
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(packed) == 14
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            dense.get_submodule(name).weight.data.copy_(module.record().dequantize())
    assert distance(logits(model), logits(dense)) < 1e-5


def test_layers_that_run_together_share_a_global_scale(source, tmp_path):
    target = tmp_path / "packed"
    main(["quantize", str(source), str(target), "--format", "nvfp4"])
    tensors = load_file(next(target.glob("*.safetensors")))
    attention = "model.layers.0.self_attn"
    scales = [tensors[f"{attention}.{name}.weight_global_scale"].item() for name in ("q_proj", "k_proj", "v_proj")]
    assert len(set(scales)) == 1
    assert tensors[f"{attention}.o_proj.weight_global_scale"].item() != scales[0]


def test_an_interrupted_conversion_goes_on_behind_the_last_whole_shard(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(conversion, "_SHARD_BYTES", 100_000)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    main(["quantize", str(source), str(whole), "--format", "nvfp4"])
    first_output = capsys.readouterr().out
    shards = sorted(whole.glob("*.safetensors"))
    assert len(shards) > 2
    shutil.copytree(whole, resumed)
    times = {}
    for index, shard in enumerate(sorted(resumed.glob("*.safetensors"))):
        if index:
            shard.unlink()
        else:
            times[shard] = shard.stat().st_mtime_ns
    main(["quantize", str(source), str(resumed), "--format", "nvfp4"])
    assert all(shard.stat().st_mtime_ns == time for shard, time in times.items())
    for shard in shards:
        again = load_file(resumed / shard.name)
        for name, value in load_file(shard).items():
            assert torch.equal(value.view(torch.uint8), again[name].view(torch.uint8)), name
    assert capsys.readouterr().out.replace("resumed", "whole") == first_output


def test_a_folder_of_another_conversion_is_not_mixed_up(source, tmp_path, capsys):
    target = tmp_path / "packed"
    main(["quantize", str(source), str(target), "--format", "nvfp4"])
    assert main(["quantize", str(source), str(target), "--format", "mxfp4"]) == 2
    assert "another conversion" in capsys.readouterr().err


def test_what_is_quantized_already_is_not_quantized_again(tmp_path, llama, capsys):
    saved = formats.compressed_nvfp4(tmp_path / "packed", llama)
    assert main(["quantize", str(saved.folder), str(tmp_path / "again"), "--format", "nvfp4"]) == 2
    assert "quantized already" in capsys.readouterr().err


@pytest.mark.parametrize("form", WeightFormat)
def test_quantizing_what_is_quantized_changes_nothing(form):
    if form is WeightFormat.FP8:
        pytest.skip("made by no command")
    group = group_of(form, 128)
    once = quantize_weight(torch.randn(8, 128), form, group)
    again = quantize_weight(once.dequantize(), form, group)
    assert torch.allclose(again.dequantize(), once.dequantize(), rtol=2e-2 if form is WeightFormat.INT4 else 1e-5)


def test_groups_must_divide_the_inputs():
    assert group_of(WeightFormat.NVFP4, 48) == 16
    assert group_of(WeightFormat.MXFP4, 48) is None
    assert group_of(WeightFormat.INT4, 96) == 32


def test_zero_weights_stay_zero():
    for form in (WeightFormat.NVFP4, WeightFormat.MXFP4, WeightFormat.INT4):
        assert not quantize_weight(torch.zeros(4, 128), form, group_of(form, 128)).dequantize().any()


@pytest.mark.parametrize("write", formats.ALL, ids=lambda write: write.__name__)
def test_inspect_names_format_size_and_kernel(tmp_path, llama, capsys, write):
    saved = write(tmp_path, llama)
    assert main(["inspect", str(saved.folder)]) == 0
    printed = capsys.readouterr().out
    assert "loaded by hfpaged" in printed and "LlamaForCausalLM" in printed
    line = next(line for line in printed.splitlines() if "mlp.up_proj" in line)
    assert ("fp8" if "fp8" in write.__name__ else write.__name__.split("_")[1].replace("mixed", "nvfp4")) in line
    assert "MiB" in line and ("packed" in line or "converted" in line or "dequantized" in line)


def test_inspect_lists_modules_one_by_one_and_the_bytes_are_those_on_disk(tmp_path, llama, capsys):
    saved = formats.modelopt_nvfp4(tmp_path, llama)
    main(["inspect", str(saved.folder), "--all"])
    printed = capsys.readouterr().out
    assert "model.layers.1.mlp.up_proj" in printed and "model.layers.*" not in printed
    tensors = load_file(saved.folder / "model.safetensors")
    total = sum(value.nbytes for value in tensors.values()) / 2**20
    assert f"{total:.1f} MiB" in printed.splitlines()[0]


def test_inspect_of_what_is_no_checkpoint(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) != 0
    assert "has no config.json, so it is no checkpoint" in capsys.readouterr().err


def test_inspect_of_a_dense_checkpoint(source, capsys):
    main(["inspect", str(source)])
    assert "not quantized" in capsys.readouterr().out
    config = json.loads((source / "config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.parametrize(
    ("write", "capability", "line"),
    [
        (formats.modelopt_nvfp4, (10, 0), "GPU: flashinfer.fp4_product. CPU: "),
        (formats.modelopt_nvfp4, (9, 0), "GPU: dequantized at every call (FlashInfer multiplies NVFP4 from compute"),
        (formats.compressed_nvfp4, (10, 3), "the product of 16-bit inputs needs a second copy of the weight). CPU: "),
        (formats.modelopt_fp8, (9, 0), "GPU: flashinfer.fp8_product. CPU: converted when loaded"),
    ],
)
def test_inspect_names_what_a_gpu_runs_and_why_nothing_faster(tmp_path, llama, write, capability, line):
    saved = write(tmp_path / "checkpoint", llama)
    lines = [one for one in Inspection(saved.folder, capability).lines() if "q_proj" in one]
    assert lines and all(line in one for one in lines)
