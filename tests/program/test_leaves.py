"""Native leaves one at a time: the results of the modules they stand for, the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
from program.leafing import forward_of, gate, kernels, random_module, random_rows
from torch import nn
from torch.nn import functional

from hfpaged.fusion.registry import FusionRefused
from hfpaged.program.abi import Activation
from hfpaged.program.description import Linear, Mlp, NotRecognized
from hfpaged.program.norms import identify_norm
from hfpaged.runtime.leaves.head_leaf import HeadLeaf
from hfpaged.runtime.leaves.linear_leaf import LinearLeaf
from hfpaged.runtime.leaves.mlp_leaf import MlpLeaf
from hfpaged.runtime.leaves.norm_leaf import NormLeaf

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEPTH, WIDTH = 90, 200
# About the numbers of rows at which tiles change.
ROW_COUNTS = (1, 2, 5, 6, 7, 12, 13, 20, 21, 40)


class GatedMlp(nn.Module):
    def __init__(self, width=DEPTH, inner=130, bias=True):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=bias) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def linear(dtype, depth=DEPTH, width=WIDTH, bias=True, seed=0):
    return random_module(lambda: nn.Linear(depth, width, bias=bias), dtype, seed)


def leaf_of(kind, dtype, threads=1):
    """(own forward, native forward, width of the input)"""
    native = kernels(threads)
    if kind == "linear":
        module = linear(dtype)
        return module, forward_of(LinearLeaf({"it": module}, gate(), native), native), DEPTH
    if kind == "wide linear":
        module = linear(dtype, depth=2048, width=70)
        return module, forward_of(LinearLeaf({"it": module}, gate(), native), native), 2048
    if kind == "head":
        module = linear(dtype, bias=False)
        return module, forward_of(HeadLeaf("it", module, gate(), native), native), DEPTH
    if kind == "norm":
        module = random_module(lambda: nn.RMSNorm(DEPTH, eps=1e-6), dtype)
        norm = identify_norm(module, DEPTH, dtype)
        return module, forward_of(NormLeaf("it", norm, dtype, gate(), native), native), DEPTH
    module = random_module(GatedMlp, dtype)
    mlp = Mlp(Linear(module.gate), Linear(module.up), Linear(module.down), Activation.SILU)
    return module, forward_of(MlpLeaf("it", module, mlp, gate(), native), native), DEPTH


KINDS = ("linear", "wide linear", "head", "norm", "mlp")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_the_module_computes(isa, kind, dtype):
    own, native, width = leaf_of(kind, dtype)
    x = random_rows(11, width, dtype)
    # Sums in another order; in 16 bits, some then round the other way.
    tolerance = max(2e-5, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(native(x), own(x), rtol=tolerance, atol=tolerance)
    assert dtype == torch.float32 or (native(x) == own(x)).float().mean() > 0.9
    # Rows of any shape, and rows that are not dense.
    shaped = x[:10].reshape(2, 5, width)
    assert torch.equal(native(shaped), native(x[:10]).reshape(2, 5, -1))
    assert torch.equal(native(shaped.transpose(0, 1)), native(shaped).transpose(0, 1))
    assert native(x[:0]).shape == own(x[:0]).shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_batch_and_thread_count(isa, kind, dtype):
    _, native, width = leaf_of(kind, dtype)
    x = random_rows(max(ROW_COUNTS), width, dtype)
    alone = torch.cat([native(row[None]) for row in x])
    for threads in (1, 2, 3):
        _, native, _ = leaf_of(kind, dtype, threads)
        for rows in ROW_COUNTS:
            assert torch.equal(native(x[:rows]), alone[:rows]), (rows, threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_threads_share_large_calls(dtype):
    """Calls that are worth more than one thread, which the small ones above are not."""
    module = linear(dtype, depth=512, width=3000)
    x = random_rows(48, 512, dtype)
    results = [
        forward_of(LinearLeaf({"it": module}, gate(), native), native)(x) for native in map(kernels, (1, 2, 3, 4))
    ]
    assert all(torch.equal(result, results[0]) for result in results)
    mlp = random_module(lambda: GatedMlp(512, 1500), dtype)
    described = Mlp(Linear(mlp.gate), Linear(mlp.up), Linear(mlp.down), Activation.SILU)
    results = [
        forward_of(MlpLeaf("it", mlp, described, gate(), native), native)(x) for native in map(kernels, (1, 2, 3, 4))
    ]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_head_gives_the_first_of_the_largest_logits(isa, dtype, threads):
    module = linear(dtype, depth=256, width=5000, bias=False)
    with torch.no_grad():
        module.weight[3000:3010] = module.weight[40:50]  # equal logits
    native = kernels(threads)
    leaf = HeadLeaf("it", module, gate(), native)
    x = random_rows(9, 256, dtype)
    x[:5] = module.weight[40:45] * 30
    forward = forward_of(leaf, native)
    expected = forward(x).float().argmax(-1)
    assert expected[:5].tolist() == [40, 41, 42, 43, 44]
    leaf.ask_argmax(9)
    assert forward(x[None]).shape == (1, 9, 0)
    assert leaf.take_argmax().tolist() == expected.tolist()
    # Asked for once only, and only for as many rows as there are.
    assert leaf.take_argmax() is None and forward(x).shape == (9, 5000)
    leaf.ask_argmax(8)
    assert forward(x).shape == (9, 5000) and leaf.take_argmax() is None


class TestLinearsOfOneInput:
    @pytest.fixture
    def modules(self):
        return {name: linear(torch.float32, width=30 + seed, seed=seed) for seed, name in enumerate("qkv")}

    @pytest.fixture
    def forwards(self, modules):
        native = kernels()
        leaf = LinearLeaf(modules, gate(), native)
        native.refresh()
        return leaf.forwards()

    def test_each_gives_its_own_output(self, modules, forwards):
        x = random_rows(3, DEPTH, torch.float32)
        for order in ("qkv", "vkq", "kk", "q", "qvv"):
            for name in order:
                torch.testing.assert_close(forwards[name](x), modules[name](x))

    def test_what_was_computed_is_not_given_for_another_tensor(self, modules, forwards):
        x = random_rows(3, DEPTH, torch.float32)
        forwards["q"](x)
        other = -x
        torch.testing.assert_close(forwards["k"](other), modules["k"](other))
        torch.testing.assert_close(forwards["v"](x), modules["v"](x))

    def test_what_was_computed_is_not_given_after_the_input_was_written_to(self, modules, forwards):
        x = random_rows(3, DEPTH, torch.float32)
        forwards["q"](x)
        x.mul_(-2)
        torch.testing.assert_close(forwards["k"](x), modules["k"](x))

    def test_an_output_that_was_written_to_is_not_given_again(self, modules, forwards):
        x = random_rows(3, DEPTH, torch.float32)
        forwards["q"](x).zero_()
        torch.testing.assert_close(forwards["q"](x), modules["q"](x))


def test_input_of_another_dtype_goes_to_the_module_itself():
    module = linear(torch.bfloat16)
    native = kernels()
    forward = forward_of(LinearLeaf({"it": module}, gate(), native), native)
    with pytest.raises(RuntimeError, match="dtype"):
        forward(random_rows(2, DEPTH, torch.float32))


def test_it_computes_with_the_old_weights_until_they_are_taken_over():
    module = linear(torch.float32)
    native = kernels()
    forward = forward_of(LinearLeaf({"it": module}, gate(), native), native)
    x, before = random_rows(3, DEPTH, torch.float32), module(random_rows(3, DEPTH, torch.float32))
    with torch.no_grad():
        module.weight.neg_()
        module.bias.zero_()
    torch.testing.assert_close(forward(x), before)
    native.refresh()
    torch.testing.assert_close(forward(x), module(x))


class Quantized(torch.Tensor):
    pass


def hook(module):
    module.register_forward_hook(lambda *_: None)


def quantize(module):
    module.weight = nn.Parameter(module.weight.as_subclass(Quantized), requires_grad=False)


def halve_bias(module):
    module.bias = nn.Parameter(module.bias.half(), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hook, "a replaced module has hooks"),
        (quantize, "weight is a tensor subclass"),
        (nn.Module.double, "x is float64"),
        (halve_bias, "bias is float16 but x is float32"),
    ],
)
def test_the_guard_refuses(change, reason):
    module = linear(torch.float32)
    leaf = LinearLeaf({"it": module}, gate(), kernels())
    change(module)
    for refused in (leaf.admit, lambda: LinearLeaf({"it": module}, gate(), kernels())):
        with pytest.raises(FusionRefused, match=reason):
            refused()


def test_an_odd_depth_of_16_bit_numbers_is_refused():
    with pytest.raises(FusionRefused, match="odd number of 16-bit inputs"):
        LinearLeaf({"it": linear(torch.bfloat16, depth=33)}, gate(), kernels())


def test_weights_of_another_shape_are_not_taken_over():
    module = linear(torch.float32)
    native = kernels()
    leaf = LinearLeaf({"it": module}, gate(), native)
    module.weight = nn.Parameter(torch.zeros(WIDTH, DEPTH + 2))
    leaf.admit()
    with pytest.raises(NotRecognized):
        native.refresh()
