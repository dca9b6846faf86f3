"""FlashInfer as hfpaged calls it, computed by gathering pages and attending densely, and strict about its contract.

It has the library's signatures (tests compare them with the installed library, where there is one) and refuses what
the library accepts and gets wrong: other integers than int32, tables on the wrong side, plans that are stale or still
being copied, unequal dtypes, head dimensions without a kernel, lengths and page ids out of range.

It also computes in fp32, which the library does not, so that texts can be compared with stock's exactly.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

from standin import fake_kernels, fake_mla, fake_products
from standin.fake_accelerator import FakeAccelerator
from standin.fake_wrappers import WRAPPERS, Wrapper

KERNELS = (
    ("norm", fake_kernels.NORMS),
    ("activation", fake_kernels.ACTIVATIONS),
    ("rope", fake_kernels.ROTATIONS),
)


def fake_flashinfer(device: FakeAccelerator) -> ModuleType:
    """The module `flashinfer` for one fake device. `made` lists its wrappers in the order they were made."""
    module = ModuleType("flashinfer")
    module.made = []

    def bound(wrapper: type[Wrapper]) -> type[Wrapper]:
        def __init__(self, *args, **kwargs):
            wrapper.__init__(self, *args, **kwargs)
            module.made.append(self)

        return type(wrapper.__name__, (wrapper,), {"device": device, "__init__": __init__})

    for wrapper in WRAPPERS:
        setattr(module, wrapper.__name__, bound(wrapper))
    module.merge_state = fake_kernels.merge_state
    module.mla = fake_mla.fake_mla(bound(fake_mla.BatchMLAPagedAttentionWrapper))
    for function in fake_products.PRODUCTS:
        setattr(module, function.__name__, fake_products.on_device(function, device))
    for name, functions in KERNELS:
        setattr(module, name, SimpleNamespace(**{function.__name__: function for function in functions}))
    return module
