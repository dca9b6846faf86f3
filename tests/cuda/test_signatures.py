"""The stand-in's signatures are those of the installed FlashInfer. Without a GPU its import needs two small packages:
`pip install --no-deps flashinfer-python apache-tvm-ffi nvidia-ml-py`.
"""

from __future__ import annotations

import inspect

import pytest
from standin import fake_kernels, fake_mla, fake_wrappers

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
