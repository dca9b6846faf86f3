"""Conditions that guards are made of: pure functions of FusionValues, giving None or why an operation may not run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hfpaged.fusion.operand import FusionValues
from hfpaged.quantization.scale_factors import swizzled_shape

Guard = Callable[[FusionValues], str | None]


def all_of(*conditions: Guard) -> Guard:
    """The first reason that any of the conditions gives."""

    def guard(values: FusionValues) -> str | None:
        return next((reason for condition in conditions if (reason := condition(values))), None)

    return guard


def needs(*roles: str) -> Guard:
    """Every role must have an operand."""

    def guard(values: FusionValues) -> str | None:
        missing = [role for role in roles if values.get(role) is None]
        return f"{missing[0]} is missing" if missing else None

    return guard


def nothing_in_between(values: FusionValues) -> str | None:
    """The replaced modules run as they were written: no autocast, hooks or adapters."""
    if values.autocast is not None:
        return f"autocast computes in {name_of(values.autocast)}"
    if values.hooked:
        return "a replaced module has hooks or a replaced forward"
    if values.adapted:
        return "a replaced module carries an adapter"
    return None


def plain_on(device: str) -> Guard:
    """Every operand is an ordinary dense tensor on `device`."""

    def guard(values: FusionValues) -> str | None:
        for role, operand in values.operands.items():
            if not operand.plain:
                return f"{role} is a tensor subclass"
            if operand.device != device:
                return f"{role} is on {operand.device}"
            if not operand.contiguous:
                return f"{role} is not contiguous"
        return None

    return guard


def plain_together(reference: str) -> Guard:
    """Every operand is an ordinary dense tensor on the device of `reference`."""

    def guard(values: FusionValues) -> str | None:
        return plain_on(values.operands[reference].device)(values)

    return guard


def dtype_among(role: str, *dtypes: torch.dtype) -> Guard:
    """The role, where present, has one of the dtypes that a kernel was compiled for."""

    def guard(values: FusionValues) -> str | None:
        operand = values.get(role)
        if operand is not None and operand.dtype not in dtypes:
            return f"{role} is {name_of(operand.dtype)}"
        return None

    return guard


def same_dtype(reference: str, *roles: str) -> Guard:
    """The roles, where present, have the dtype of `reference`: PyTorch would otherwise promote the result."""

    def guard(values: FusionValues) -> str | None:
        wanted = values.operands[reference].dtype
        for role in roles:
            operand = values.get(role)
            if operand is not None and operand.dtype != wanted:
                return f"{role} is {name_of(operand.dtype)} but {reference} is {name_of(wanted)}"
        return None

    return guard


def promotes_to(reference: str, *roles: str) -> Guard:
    """Arithmetic between `reference` and each of the roles, where present, stays in the dtype of `reference`."""

    def guard(values: FusionValues) -> str | None:
        wanted = values.operands[reference].dtype
        for role in roles:
            operand = values.get(role)
            if operand is not None and torch.promote_types(operand.dtype, wanted) != wanted:
                return f"{role} is {name_of(operand.dtype)} but {reference} is {name_of(wanted)}"
        return None

    return guard


def same_width(reference: str, *roles: str) -> Guard:
    """The roles, where present, are as wide as `reference` in the last dimension."""

    def guard(values: FusionValues) -> str | None:
        wanted = values.operands[reference].shape[-1]
        for role in roles:
            operand = values.get(role)
            if operand is not None and operand.shape[-1] != wanted:
                return f"{role} has {operand.shape[-1]} elements where {reference} has {wanted}"
        return None

    return guard


def width_among(role: str, *widths: int) -> Guard:
    """The role, where present, has a last dimension that a kernel was compiled for."""

    def guard(values: FusionValues) -> str | None:
        operand = values.get(role)
        if operand is not None and operand.shape[-1] not in widths:
            return f"{role} has {operand.shape[-1]} elements, for which there is no kernel"
        return None

    return guard


def multiple_of(role: str, step: int) -> Guard:
    """The role's last dimension is a whole number of what a kernel loads at a time."""

    def guard(values: FusionValues) -> str | None:
        width = values.operands[role].shape[-1]
        return f"{role} has {width} elements, which is no multiple of {step}" if width % step else None

    return guard


def tiled_scales(group: int) -> Guard:
    """The scales are there for every group of the codes, two of which are a byte, filled up to whole tiles."""

    def guard(values: FusionValues) -> str | None:
        rows, width = values.operands["codes"].shape
        wanted = swizzled_shape(rows, 2 * width // group)
        found = values.operands["scales"].shape
        return None if found == wanted else f"scales are {list(found)}, and tiles for the codes {list(wanted)}"

    return guard


def capability_from(oldest: tuple[int, int]) -> Guard:
    """The device has at least this compute capability."""

    def guard(values: FusionValues) -> str | None:
        if values.capability is None or values.capability < oldest:
            return f"the compute capability is {values.capability}, before {oldest}"
        return None

    return guard


def capability_among(*compiled: tuple[int, int]) -> Guard:
    """The device has one of these compute capabilities."""

    def guard(values: FusionValues) -> str | None:
        if values.capability not in compiled:
            return f"the compute capability is {values.capability}, for which there is no kernel"
        return None

    return guard


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` instead of `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
