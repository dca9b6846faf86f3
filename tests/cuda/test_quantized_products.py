"""Packed weights on a GPU: which kernel multiplies with them, that it gets what it reads, and what runs otherwise."""

from __future__ import annotations

import itertools

import pytest
import torch
from batches import left_padded, random_prompts
from quantization import checkpoints as make
from quantization import formats
from quantization.checkpoints import Saved, save, tiny_llama
from transformers import PreTrainedModel

import hfpaged
from hfpaged.fusion.operand import FusionValues, Operand
from hfpaged.fusion.product_catalogue import QUANTIZED_PRODUCTS
from hfpaged.fusion.registry import FusionRegistry
from hfpaged.quantization.packed_linear import PackedLinear
from hfpaged.quantization.products import BF16_FP4, FP4, FP8, SCALED_ROWS, Arithmetic, choose_product
from hfpaged.quantization.record import WeightFormat
from hfpaged.quantization.scale_factors import unswizzle
from hfpaged.runtime.device.fused_forwards import FusedForwards
from hfpaged.runtime.device.fused_product import is_packed_in_rows
from hfpaged.runtime.view import EngineView

PROMPTS = random_prompts((12, 5))
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": -1, "max_new_tokens": 6}
LINEARS = 14  # of the tiny Llama
GUARDS = {fusion.name: fusion.guard for fusion in QUANTIZED_PRODUCTS}


def fp8_by_rows(folder, model: PreTrainedModel) -> Saved:
    """One scale for each output, inputs quantized token by token."""

    def pack(name: str, weight: torch.Tensor) -> make.Packed:
        scale = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return make.Packed({"weight": codes, "weight_scale": scale}, codes.float() * scale)

    return save(folder, model, pack, make.modelopt_config("FP8_PER_CHANNEL_PER_TOKEN"))


@pytest.fixture
def loaded(cuda, tmp_path):
    """Loads what a writer writes, as on a GPU of some compute capability."""

    def load(write, capability: tuple[int, int], **options: object) -> PreTrainedModel:
        cuda.device.capability = capability
        saved = write(tmp_path / write.__name__, tiny_llama())
        return hfpaged.from_pretrained(saved.folder, dtype=torch.bfloat16, **options)

    return load


def counting(monkeypatch, library, name: str) -> list[int]:
    calls: list[int] = []
    function = getattr(library, name)
    monkeypatch.setattr(library, name, lambda *args, **kwargs: calls.append(1) or function(*args, **kwargs))
    return calls


def run(model: PreTrainedModel) -> tuple[torch.Tensor, dict]:
    """Logits of the first step, and statistics."""
    with hfpaged.patched(model):
        output = model.generate(**left_padded(PROMPTS), **GREEDY, output_logits=True, return_dict_in_generate=True)
        return output.logits[0].float(), hfpaged.engine(model).stats()


def own_logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([model(torch.tensor([prompt])).logits[0, -1].float() for prompt in PROMPTS])


# Writer, compute capability, kernel, its fusion, and how far logits may be off: what is rounded to a few bits takes
# the last bits of bfloat16, which differ, for more than they are.
PRODUCTS = [
    (formats.modelopt_nvfp4, (10, 0), "mm_fp4", FP4, 0.4),
    (formats.compressed_nvfp4_activations, (12, 0), "mm_fp4", FP4, 0.4),
    (formats.compressed_nvfp4, (12, 1), "mm_bf16_fp4", BF16_FP4, 2e-2),
    (formats.modelopt_fp8, (8, 9), "mm_fp8", FP8, 0.15),
    (formats.modelopt_fp8, (9, 0), "mm_fp8", FP8, 0.15),
    (fp8_by_rows, (9, 0), None, SCALED_ROWS, 0.15),
]


@pytest.mark.parametrize(("write", "capability", "kernel", "fusion", "tolerance"), PRODUCTS)
def test_a_product_of_packed_numbers_runs(loaded, cuda, monkeypatch, write, capability, kernel, fusion, tolerance):
    calls = counting(monkeypatch, cuda.library, kernel) if kernel else None
    model = loaded(write, capability)
    right = own_logits(model)
    logits, stats = run(model)
    assert all(line.endswith(f", by {fusion}") for line in stats["quantization"])
    assert sum(stats["quantization"].values()) == LINEARS
    assert not stats["fallbacks"] and stats["captured_steps"] > 0 and stats["failed_steps"] == 0
    # One comparison with each module's own code, and a call in each step that was not replayed.
    assert calls is None or len(calls) >= 2 * LINEARS
    assert (logits - right).norm() < tolerance * right.norm()


@pytest.mark.parametrize(("write", "capability"), [case[:2] for case in PRODUCTS])
def test_each_product_is_that_of_the_modules_own_code(loaded, write, capability):
    view, forwards = fused(loaded(write, capability))
    assert forwards.fused["product"] == LINEARS
    for module in view.model.modules():
        if is_packed_in_rows(module):
            x = torch.randn(2, 9, module.in_features).bfloat16()
            own = PackedLinear.forward(module, x).float()
            assert (module(x).float() - own).norm() <= 2e-2 * own.norm()
            assert module(x[:0]).shape == (0, 9, module.out_features)
            assert module(x.float()).dtype is torch.float32


def fused(model: PreTrainedModel) -> tuple[EngineView, FusedForwards]:
    view = EngineView(model, type(model))
    return view, FusedForwards(view, torch.bfloat16, FusionRegistry(QUANTIZED_PRODUCTS))


@pytest.mark.parametrize(
    ("write", "capability", "reason"),
    [
        (formats.modelopt_nvfp4, (9, 0), "FlashInfer multiplies NVFP4 from compute capability 10.0 on, this is compute "
         "capability 9.0"),
        (formats.compressed_nvfp4, (10, 0), "for compute capability 10.0 the product of 16-bit inputs needs a second "
         "copy of the weight"),
        (formats.compressed_mxfp4, (10, 0), "FlashInfer has no product of 16-bit inputs with mxfp4 weights"),
        (formats.compressed_int4, (12, 0), "FlashInfer has no product of 16-bit inputs with int4 weights"),
        (formats.modelopt_fp8, (8, 0), "8-bit floats are multiplied from compute capability 8.9 on, this is compute "
         "capability 8.0"),
    ],
)  # fmt: skip
def test_without_a_product_weights_are_dequantized_at_every_call(loaded, cuda, monkeypatch, write, capability, reason):
    calls = [counting(monkeypatch, cuda.library, name) for name in ("mm_fp4", "mm_fp8", "mm_bf16_fp4")]
    model = loaded(write, capability)
    right = own_logits(model)
    logits, stats = run(model)
    assert not any(calls), "16-bit inputs became quantized ones"
    assert {key: count for key, count in stats["tier_refusals"].items() if key.startswith("product")} == {
        f"product: {reason}": LINEARS
    }
    assert all(key.endswith(", dequantized at every call") for key in stats["quantization"])
    has_rounded_inputs = any("rounded" in key for key in stats["quantization"])
    assert (logits - right).norm() < (0.4 if has_rounded_inputs else 2e-2) * right.norm()
    assert not stats["fallbacks"] and stats["captured_steps"] > 0


def test_weight_only_is_an_option_for_checkpoints_with_quantized_inputs(loaded, cuda, monkeypatch):
    calls = counting(monkeypatch, cuda.library, "mm_fp4")
    _, stats = run(loaded(formats.modelopt_nvfp4, (10, 0), activations="weight-only"))
    assert not calls
    assert stats["quantization"] == {"nvfp4 weights, inputs as they are, dequantized at every call": LINEARS}


@pytest.mark.parametrize("wrong", ["scales in rows", "reciprocal", "nibbles"])
def test_a_kernel_that_reads_another_layout_is_refused(loaded, cuda, monkeypatch, wrong):
    product = cuda.library.mm_fp4

    def other(a, b, a_descale, b_descale, alpha, *args, **kwargs):
        if wrong == "scales in rows":
            shape = b_descale.t().shape
            b_descale = unswizzle(b_descale.t(), *shape).contiguous().t()
        elif wrong == "reciprocal":
            alpha = 1 / alpha
        else:
            b = ((b >> 4) | (b << 4)).t().contiguous().t()
        return product(a, b, a_descale, b_descale, alpha, *args, **kwargs)

    model = loaded(formats.modelopt_nvfp4, (10, 0))
    monkeypatch.setattr(cuda.library, "mm_fp4", other)
    _, forwards = fused(model)
    assert not forwards.fused["product"]
    assert forwards.refusals["product: the kernel's results are not the module's"] == LINEARS


def test_no_second_copy_of_a_weight_is_kept(loaded):
    view, forwards = fused(loaded(formats.modelopt_nvfp4, (10, 0)))
    assert forwards.fused["product"] == LINEARS
    for module in view.model.modules():
        product = vars(module).get("forward")
        if product is not None:
            kept = [value for value in vars(product).values() if isinstance(value, torch.Tensor)]
            assert sum(tensor.numel() for tensor in kept) == 2  # the scale of the input, and that of the product


# ---- guards ----

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn)


def four_bit(x=torch.bfloat16, codes=torch.uint8, scales=torch.uint8, alpha=torch.float32) -> FusionValues:
    operands = {
        "x": Operand(x, (-1, 64)), "out": Operand(x, (-1, 160)), "codes": Operand(codes, (160, 32)),
        "scales": Operand(scales, (256, 4)), "alpha": Operand(alpha, (1,)), "input_scale": Operand(torch.float32, (1,)),
    }  # fmt: skip
    return FusionValues(operands, capability=(12, 0))


def test_four_bit_guards_over_every_product_of_dtypes():
    for dtypes in itertools.product(DTYPES, repeat=4):
        x, *others = dtypes
        is_right = others == [torch.uint8, torch.uint8, torch.float32]
        assert (GUARDS[FP4](four_bit(*dtypes)) is None) == (is_right and x in (torch.bfloat16, torch.float16)), dtypes
        assert (GUARDS[BF16_FP4](four_bit(*dtypes)) is None) == (is_right and x is torch.bfloat16), dtypes


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"x": Operand(torch.bfloat16, (-1, 48))}, "x has 48 elements, which is no multiple of 32"),
        ({"out": Operand(torch.bfloat16, (-1, 48))}, "out has 48 elements, which is no multiple of 32"),
        ({"out": Operand(torch.float16, (-1, 160))}, "out is float16 but x is bfloat16"),
        ({"scales": Operand(torch.uint8, (160, 4))}, "scales are [160, 4], and tiles for the codes [256, 4]"),
        ({"codes": Operand(torch.uint8, (160, 32), contiguous=False)}, "codes is not contiguous"),
        ({"codes": Operand(torch.uint8, (160, 32), plain=False)}, "codes is a tensor subclass"),
        ({"codes": Operand(torch.uint8, (160, 32), device="cuda")}, "codes is on cuda"),
        ({"alpha": None}, "alpha is missing"),
    ],
)  # fmt: skip
def test_four_bit_guards_name_what_is_wrong(changed, reason):
    operands = four_bit().operands | changed
    present = {role: operand for role, operand in operands.items() if operand is not None}
    assert GUARDS[FP4](FusionValues(present, capability=(12, 0))) == reason
    older = FusionValues(four_bit().operands, capability=(9, 0))
    assert GUARDS[FP4](older) == "the compute capability is (9, 0), before (10, 0)"


@pytest.mark.parametrize("name", [FP8, SCALED_ROWS])
def test_eight_bit_guards_over_every_product_of_dtypes(name):
    for dtypes in itertools.product(DTYPES, repeat=3):
        x, codes, scales = dtypes
        operands = {
            "x": Operand(x, (-1, 64)), "out": Operand(x, (-1, 32)), "codes": Operand(codes, (32, 64)),
            "scales": Operand(scales, (1, 1)), "alpha": Operand(torch.float32, (1,)),
        }  # fmt: skip
        reason = GUARDS[name](FusionValues(operands, capability=(9, 0)))
        assert (reason is None) == (dtypes == (torch.bfloat16, torch.float8_e4m3fn, torch.float32)), dtypes


CAPABILITIES = ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))


def test_what_is_chosen_quantizes_inputs_only_where_the_checkpoint_does():
    activations = (None, "fp8", "nvfp4", "mxfp4")
    every = itertools.product(WeightFormat, ("tensor", "row", "block"), activations, (False, True), CAPABILITIES)
    for *arithmetic, capability in every:
        form, _, activation, _ = arithmetic
        choice = choose_product(Arithmetic(*arithmetic), capability)
        assert (choice.fusion is None) == (choice.reason is not None)
        if choice.fusion in (FP4, FP8, SCALED_ROWS):
            assert activation == form.value == ("nvfp4" if choice.fusion == FP4 else "fp8")
        if choice.fusion == BF16_FP4:
            assert activation is None and form is WeightFormat.NVFP4
