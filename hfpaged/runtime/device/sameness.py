"""Whether a kernel gives what the code that it stands for gives."""

from __future__ import annotations

import torch

from hfpaged.program.description import NotRecognized

# Of the largest element: three roundings to bfloat16.
_TOLERANCE = 3 * 2.0**-8
# Of the norm: a few codes that are neighbours. A scale in a wrong place or upside down is an error of a third and more.
_ROUNDED_TOLERANCE = 0.05


def are_close(kernel: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether two results are equal up to roundings. This waits for the device; it happens once, before any step."""
    if kernel.shape != own.shape or kernel.dtype is not own.dtype:
        return False
    return bool(((own.float() - kernel.float()).abs() <= _TOLERANCE * own.float().abs().max()).all())


def are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers. This waits for the device."""
    return a.shape == b.shape and a.dtype is b.dtype and bool((a == b).all())


def require_close(kernel: torch.Tensor, own: torch.Tensor) -> None:
    """Refuse a kernel whose result is another.

    Raises:
        NotRecognized: it is.
    """
    if not are_close(kernel, own):
        raise NotRecognized("the kernel's results are not the module's")


def random_rows(count: int, width: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[count, width] on the device, the rows of very different size."""
    generator = torch.Generator(device=device).manual_seed(1)
    sizes = torch.logspace(-2, 2, count, device=device)[:, None]
    return (torch.randn(count, width, generator=generator, device=device) * sizes).to(dtype)


def require_near(kernel: torch.Tensor, own: torch.Tensor) -> None:
    """Refuse a kernel whose results, of inputs that both round to a few bits, are others on the whole.

    Raises:
        NotRecognized: they are.
    """
    if kernel.shape != own.shape or kernel.dtype is not own.dtype:
        raise NotRecognized("the kernel's results are not the module's")
    difference = (kernel.float() - own.float()).norm()
    if not bool(difference <= _ROUNDED_TOLERANCE * own.float().norm()):
        raise NotRecognized("the kernel's results are not the module's")


def calibrated_rows(count: int, width: int, largest: float, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[count, width] on the device, of magnitudes up to `largest`, those of neighbouring groups very different."""
    generator = torch.Generator(device=device).manual_seed(1)
    sizes = torch.logspace(-1, 0, width, device=device)
    return ((2 * torch.rand(count, width, generator=generator, device=device) - 1) * sizes * largest).to(dtype)
