"""The stand-in's signatures are those of the installed FlashInfer. Without a GPU its import needs two small packages:
`pip install --no-deps flashinfer-python apache-tvm-ffi nvidia-ml-py`.
"""

from __future__ import annotations

import inspect

import pytest
from standin import fake_kernels, fake_mla, fake_products, fake_wrappers

flashinfer = pytest.importorskip("flashinfer")


def parameters(function):
    """Names, kinds and defaults, in order."""
    return [
        (parameter.name, parameter.kind, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
@pytest.mark.parametrize("wrapper", [wrapper.__name__ for wrapper in fake_wrappers.WRAPPERS])
def test_wrappers(wrapper, method):
    real = getattr(flashinfer, wrapper)
    # The decode wrapper's plan takes what its implementation takes, and deprecated positional arguments.
    real_method = getattr(real, f"_{method}_impl", None) or getattr(real, method)
    fake_method = getattr(getattr(fake_wrappers, wrapper), method)
    assert parameters(fake_method) == parameters(real_method)


@pytest.mark.parametrize(
    ("place", "function"),
    [
        (place, function)
        for place, functions in (
            ("norm", fake_kernels.NORMS),
            ("activation", fake_kernels.ACTIVATIONS),
            ("rope", fake_kernels.ROTATIONS),
        )
        for function in functions
    ],
)
def test_functions(place, function):
    assert parameters(function) == parameters(getattr(getattr(flashinfer, place), function.__name__))


@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
def test_the_wrapper_for_latents(method):
    real, fake = (module.BatchMLAPagedAttentionWrapper for module in (flashinfer.mla, fake_mla))
    assert parameters(getattr(fake, method)) == parameters(getattr(real, method))


def test_the_tables_for_latents():
    real, fake = (module.MLAPlanMetadata.csr for module in (flashinfer.mla, fake_mla))
    assert parameters(fake) == parameters(real)


def test_merging():
    assert parameters(fake_kernels.merge_state) == parameters(flashinfer.merge_state)


@pytest.mark.parametrize("function", fake_products.PRODUCTS, ids=lambda function: function.__name__)
def test_products(function):
    real, fake = (parameters(one) for one in (getattr(flashinfer, function.__name__), function))
    # One default is a mark of the library's own.
    assert [(name, kind, repr(default)) for name, kind, default in fake] == [
        (name, kind, repr(default)) for name, kind, default in real
    ]


@pytest.mark.parametrize("function", fake_products.PRODUCTS, ids=lambda function: function.__name__)
def test_capabilities_of_products(function):
    real = getattr(flashinfer, function.__name__)
    if not hasattr(real, "is_backend_supported"):
        pytest.skip("the library does not say")
    backend = {"mm_fp4": "cutlass", "mm_bf16_fp4": "cute-dsl-native", "mm_fp8": "cublas"}[function.__name__]
    for major, minor in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]:
        supported = real.is_backend_supported(backend, major * 10 + minor)
        assert supported == ((major, minor) in fake_products.PRODUCTS[function])
