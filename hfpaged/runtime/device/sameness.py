"""Whether a kernel gives what the code that it stands for gives."""

from __future__ import annotations

import torch

from hfpaged.program.description import NotRecognized

# Of the largest element: three roundings to bfloat16.
_TOLERANCE = 3 * 2.0**-8


def are_close(kernel: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether two results are equal up to roundings. This waits for the device; it happens once, before any step."""
    if kernel.shape != own.shape or kernel.dtype is not own.dtype:
        return False
    return bool(((own.float() - kernel.float()).abs() <= _TOLERANCE * own.float().abs().max()).all())


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
