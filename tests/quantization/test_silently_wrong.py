"""The cases that Transformers loads without an error and computes wrong numbers with: loaded right here, or refused."""

from __future__ import annotations

import pytest
import torch
from quantization import checkpoints as make
from quantization import formats
from quantization.checkpoints import kv_scales, save
from quantization.test_loading import distance, load, logits
from transformers import AutoModelForCausalLM

import hfpaged
from hfpaged.errors import CheckpointError, UnsupportedModelError
from hfpaged.quantization.checkpoint import Checkpoint
from hfpaged.quantization.registration import METHOD
from hfpaged.quantization.stock_check import check_loading_info, check_stock_checkpoint


def test_1_nvfp4_is_not_replaced_by_random_weights_where_sizes_may_differ(tmp_path, llama):
    saved = formats.modelopt_nvfp4(tmp_path, llama)
    model = load(saved, activations="weight-only", ignore_mismatched_sizes=True)
    assert distance(logits(model), logits(saved.dense)) < 1e-5


def test_2_fp8_weights_are_scaled(tmp_path, llama):
    saved = formats.modelopt_fp8(tmp_path, llama)
    assert distance(logits(load(saved, activations="weight-only")), logits(saved.dense)) < 1e-5


def test_3_fp8_with_the_older_config_alone_is_scaled_and_refused_where_it_was_not(tmp_path, llama):
    saved = formats.modelopt_fp8_file_only(tmp_path, llama)
    assert distance(logits(load(saved, activations="weight-only")), logits(saved.dense)) < 1e-5
    stock = AutoModelForCausalLM.from_pretrained(saved.folder, dtype=torch.float32)
    assert distance(logits(stock), logits(saved.dense)) > 0.3
    with pytest.raises(UnsupportedModelError, match=r"modelopt checkpoint.*use hfpaged.from_pretrained"):
        hfpaged.patch(stock)


def test_4_a_global_scale_stored_as_its_reciprocal_is_refused(tmp_path, llama):
    def inverted(name, weight):
        packed = make.nvfp4_compressed(name, weight)
        packed.tensors["weight_global_scale"] = 1 / packed.tensors["weight_global_scale"]
        return packed

    config = make.compressed_config("nvfp4-pack-quantized", make.NVFP4_ARGS)
    with pytest.raises(CheckpointError, match=r"weight_global_scale .* reciprocal"):
        load(save(tmp_path, llama, inverted, config))


def test_5_ragged_fp8_blocks_follow_the_config(tmp_path, llama):
    saved = formats.ragged_fp8(tmp_path, llama)
    assert distance(logits(load(saved)), logits(saved.dense)) < 1e-5


def test_6_scales_of_keys_and_values_are_not_dropped(tmp_path, llama):
    name = "model.layers.0.self_attn.k_scale"
    config = make.compressed_config("nvfp4-pack-quantized", make.NVFP4_ARGS, kv_cache_scheme={"num_bits": 8})
    saved = save(tmp_path, llama, make.nvfp4_compressed, config, {name: torch.tensor([0.75])})
    assert kv_scales(load(saved)) == {name: 0.75}


def test_7_an_ignore_list_that_misses_a_dense_layer_is_refused(tmp_path, llama):
    config = make.compressed_config("nvfp4-pack-quantized", make.NVFP4_ARGS, ignore=["language_model.lm_head"])
    with pytest.raises(CheckpointError, match=r"lm_head.weight_packed is missing"):
        load(save(tmp_path, llama, make.nvfp4_compressed, config))


@pytest.mark.parametrize("version, zero", [("gptq_v2", 7), ("gptq", 8)])
def test_8_gptq_zeros_of_the_other_version_are_refused(tmp_path, llama, version, zero):
    def pack(name, weight):
        zeros = torch.full((weight.shape[1] // 32, weight.shape[0] // 2), zero * 17, dtype=torch.uint8)
        return make.Packed({"qzeros": zeros.view(torch.int32)}, weight)

    config = {"quant_method": "gptq", "bits": 4, "sym": True, "checkpoint_format": version, "group_size": 32}
    saved = save(tmp_path, llama, pack, config)
    with pytest.raises(CheckpointError, match=rf"qzeros holds {zero} .*'{version}'"):
        load(saved)
    right = {**config, "checkpoint_format": "gptq" if version == "gptq_v2" else "gptq_v2"}
    check_stock_checkpoint(Checkpoint(save(tmp_path / "right", llama, pack, right).folder))


def test_8b_the_gptq_backend_that_computes_asymmetric_weights_wrong_is_refused(tmp_path, llama):
    config = {"quant_method": "gptq", "bits": 4, "sym": False, "backend": "gptq_torch_fused"}
    with pytest.raises(CheckpointError, match="gptq_torch_fused"):
        load(save(tmp_path, llama, lambda name, weight: make.Packed({}, weight), config))


def test_9_gguf_nvfp4_with_tensor_scales_is_refused(tmp_path, llama):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    quantized = torch.zeros(4, 36, dtype=torch.uint8).numpy()
    writer.add_tensor("blk.0.ffn_up.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.NVFP4)
    writer.add_tensor("blk.0.ffn_up.scale", torch.ones(1).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_up.scale would be left out"):
        hfpaged.from_pretrained(tmp_path, gguf_file="model.gguf")


def test_quantized_tensors_that_stock_left_over_or_made_up_are_an_error():
    for kind in ("missing_keys", "unexpected_keys"):
        with pytest.raises(CheckpointError, match=r"up_proj.weight_scale"):
            check_loading_info({kind: {"model.layers.0.mlp.up_proj.weight_scale"}})
    check_loading_info({"missing_keys": {"lm_head.weight"}, "unexpected_keys": {"model.rotary.inv_freq"}})


def test_fp8_without_any_config_is_refused(tmp_path, llama):
    saved = save(tmp_path, llama, make.fp8_tensor, None)
    with pytest.raises(CheckpointError, match="no config says how"):
        load(saved)


def test_only_the_unclaimed_name_is_registered():
    from transformers.quantizers import auto

    ours = [name for name, cls in auto.AUTO_QUANTIZER_MAPPING.items() if cls.__module__.startswith("hfpaged")]
    assert ours == [METHOD]
