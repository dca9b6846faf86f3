"""Packed models on the engine: the step program over 4-bit weights, and the modules tier."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from program.stepping import Stepper
from quantization import formats
from quantization.checkpoints import PROMPT, tiny_llama
from quantization.test_loading import distance, load
from transformers import AutoModelForCausalLM, PreTrainedModel

import hfpaged
from hfpaged.native import library
from hfpaged.program.description import NotRecognized
from hfpaged.program.program import StepProgram

PACKED = (formats.compressed_nvfp4, formats.compressed_mxfp4, formats.compressed_int4, formats.modelopt_nvfp4)


@pytest.fixture(autouse=True)
def kernels() -> None:
    reason = library.unavailable()
    if reason:
        pytest.skip(reason)


def program_logits(model: PreTrainedModel, prompt: list[int] = PROMPT) -> torch.Tensor:
    program = StepProgram.build(model, num_threads=1)
    stepper = Stepper(program, max_requests=1)
    batch = stepper.batch([(stepper.add(prompt), len(prompt))])
    _, logits = program.run(batch, stepper.kv, np.arange(len(prompt)), want_logits=True)
    return logits


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("write", PACKED, ids=lambda write: write.__name__)
def test_the_program_computes_with_the_dequantized_weights(tmp_path, llama, write, dtype, limit):
    saved = write(tmp_path, llama)
    model = load(saved, dtype, activations="weight-only")
    with torch.no_grad():
        expected = saved.dense(torch.tensor([PROMPT])).logits[0]
    assert distance(program_logits(model), expected) <= limit


def test_weights_that_are_exact_in_bf16_give_the_bits_of_dense_ones(tmp_path, llama):
    if library.isa() != "avx512bf16":
        pytest.skip("other instruction sets scale the sums of groups")
    saved = formats.compressed_mxfp4(tmp_path, llama)
    saved.dense.save_pretrained(tmp_path / "dense")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16).eval()
    assert torch.equal(program_logits(load(saved, torch.bfloat16)), program_logits(dense))


def test_the_program_reads_the_modules_own_memory(tmp_path, llama):
    model = load(formats.compressed_nvfp4(tmp_path, llama), torch.bfloat16)
    program = StepProgram.build(model, num_threads=1)
    head = model.lm_head.weight.nbytes
    assert head <= program.packed_bytes <= 1.6 * head  # nothing but the head is copied, and in 8 bits once more
    packed = sum(module.num_bytes for module in model.modules() if hasattr(module, "codes"))
    linears = sum(
        module.in_features * module.out_features * 2 for module in model.modules() if hasattr(module, "codes")
    )
    assert packed <= 0.30 * linears


def test_a_row_has_the_same_bits_alone_and_in_a_batch(tmp_path, llama):
    model = load(formats.compressed_nvfp4(tmp_path, llama), torch.bfloat16)
    program = StepProgram.build(model, num_threads=2, min_thread_seconds=0)
    prompts = [[(7 * i + k) % 256 for i in range(3 + 5 * k)] for k in range(6)]

    def logits(prompts: list[list[int]]) -> list[torch.Tensor]:
        stepper = Stepper(program)
        requests = [stepper.add(prompt) for prompt in prompts]
        stepper.step([(request, len(request.tokens)) for request in requests])
        return [request.logits[-1] for request in requests]

    together = logits(prompts)
    for prompt, expected in zip(prompts, together, strict=True):
        assert torch.equal(logits([prompt])[0], expected)


def test_quantized_inputs_are_left_to_the_modules(tmp_path, llama):
    model = load(formats.modelopt_nvfp4(tmp_path, llama))
    with pytest.raises(NotRecognized):
        StepProgram.build(model, num_threads=1)


@pytest.mark.parametrize("write", formats.ALL, ids=lambda write: write.__name__)
def test_patched_models_generate_the_tokens_of_the_unpatched(tmp_path, llama, stock_greedy, write):
    model = load(write(tmp_path, llama))
    prompts = [PROMPT, PROMPT[:5], PROMPT[3:9]]
    expected = [stock_greedy(model, prompt, 8) for prompt in prompts]
    with hfpaged.patched(model, num_blocks=64):
        engine = hfpaged.engine(model)
        handles = [engine.submit(prompt, max_new_tokens=8, eos_token_id=-1) for prompt in prompts]
        assert [handle.result() for handle in handles] == expected
        packed = write in formats.WEIGHT_ONLY
        assert (engine.stats()["tier"] == "program") == packed


def test_a_copy_of_a_packed_model_has_its_own_memory(tmp_path, llama):
    model = load(formats.compressed_nvfp4(tmp_path, llama))
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        before = model(ids).logits
        twin = copy.deepcopy(model)
        for module in twin.modules():
            if hasattr(module, "codes"):
                module.codes.zero_()
        assert torch.equal(model(ids).logits, before)
        assert not torch.equal(twin(ids).logits, before)


def test_layers_that_fill_no_strip_are_left_to_the_modules(tmp_path):
    llama = tiny_llama(hidden=96, inner=64)  # heads of 24: keys begin at no multiple of 16
    model = load(formats.compressed_mxfp4(tmp_path, llama))
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    try:
        got = program_logits(model)
    except NotRecognized as refused:
        assert "strips of 16" in refused.reason
    else:
        assert distance(got, expected) < 1e-5
