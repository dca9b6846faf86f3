"""Parameters that exist only in a tier's packed matrices, until something asks for their numbers.

A parameter that nothing but its modules holds makes way for a `ReleasedWeight`, which knows its shape and dtype.
Whatever does more with one of those has all of them filled again first, and they become ordinary parameters where they
are: so saving, training, optimizers and the model's own forward find what they would have found.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from hfpaged.errors import ReleasedWeightError
from hfpaged.native import library
from hfpaged.program.packed_copies import PackedCopy, packed_copies
from hfpaged.program.panels import PackedMatrix

Place = tuple[nn.Module, str]

_OWNER = "_hfpaged_owner"
# What can be said about a parameter without its numbers.
_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "nbytes", "requires_grad", "grad", "is_leaf", "is_cuda",
               "is_meta", "is_quantized", "is_sparse")  # fmt: skip
_METHODS = ("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_inference",
            "__hash__")  # fmt: skip
_HARMLESS = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
        *(getattr(torch.Tensor, name) for name in _METHODS),
    ]
)


class ReleasedWeight(nn.Parameter):
    """What a released parameter is meanwhile."""

    def __new__(cls, parameter: nn.Parameter, owner: ReleasedWeights) -> ReleasedWeight:
        made = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device, requires_grad=parameter.requires_grad
        )
        vars(made).update(vars(parameter), **{_OWNER: owner})
        return made

    def __init__(self, parameter: nn.Parameter, owner: ReleasedWeights):
        """Nothing to do: see `__new__`."""

    def restore(self) -> None:
        """Have the owner fill all its parameters. Afterwards this is an ordinary one."""
        owner = vars(self).get(_OWNER)
        if owner is not None:  # otherwise another thread has just done it
            owner.restore()

    def become(self, numbers: torch.Tensor) -> None:
        """Become an ordinary parameter in the memory of `numbers`."""
        with torch.inference_mode(False):
            plain = nn.Parameter(numbers, requires_grad=self.requires_grad)
        # The class last: until then, other threads that come here wait for the lock of the owner.
        torch._C._swap_tensor_impl(self, plain)
        del vars(self)[_OWNER]
        self.__class__ = nn.Parameter

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, ReleasedWeight):
                value.restore()
        return func(*args, **kwargs)

    # A parameter's own look up their class before they look at the numbers.

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        self.restore()
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: int) -> tuple:
        self.restore()
        return self.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Iterable[type], args: tuple = (), kwargs: Any = None) -> Any:
        raise ReleasedWeightError(f"{func} on a parameter that is only there in packed form")


class ReleasedWeights:
    """Releases parameters and restores them. Any thread may restore; the engine's stepping thread releases."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._released: list[tuple[ReleasedWeight, PackedCopy]] = []

    @property
    def num_bytes(self) -> int:
        """Memory that the parameters which are released now would take."""
        return sum(weight.nbytes for weight, _ in list(self._released))

    def release(self, model: PreTrainedModel, matrices: Iterable[PackedMatrix]) -> bool:
        """Release what `matrices`, packed from the present weights of `model`, hold whole, if nothing is released now.

        A parameter stays if a module uses it that computes from something else (a tied embedding), if it shares its
        memory, has a gradient or hooks, or if somebody else holds it, an optimizer perhaps.

        Returns:
            Whether anything was released.
        """
        with self._lock:
            if self._released:
                return False
            for places, copy in _releasable(model, matrices):
                weight = self._replaced(places)
                if weight is not None:
                    self._released.append((weight, copy))
            if self._released:
                library.return_free_memory()
            return bool(self._released)

    def restore(self) -> None:
        """Fill all released parameters again, bit for bit.

        Raises:
            ReleasedWeightError: there is no memory for one of them.
        """
        with self._lock:
            while self._released:
                weight, copy = self._released[-1]
                weight.become(_unpacked(weight, copy))
                self._released.pop()

    def _replaced(self, places: list[Place]) -> ReleasedWeight | None:
        """What stands in these places now, instead of a parameter that is gone; None if somebody else held that."""
        module, name = places[0]
        weight, reference = ReleasedWeight(module._parameters[name], self), weakref.ref(module._parameters[name])
        for module, name in places:
            module._parameters[name] = weight
        held = reference()
        if held is None:
            return weight
        for module, name in places:
            module._parameters[name] = held
        weight.become(held.detach())  # for a thread that has just found it in its place
        return None


def _releasable(model: PreTrainedModel, matrices: Iterable[PackedMatrix]) -> Iterator[tuple[list[Place], PackedCopy]]:
    """All places of each parameter that may be released. Does not hold the parameters."""
    copies = packed_copies(matrices)
    holders: dict[int, list[Place]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            holders[id(parameter)].append((module, name))
    for places in holders.values():
        module, name = places[0]
        if all(place in copies for place in places) and _stands_alone(module._parameters[name]):
            yield places, copies[places[0]]


def _stands_alone(parameter: nn.Parameter) -> bool:
    """Whether it is an ordinary parameter with memory of its own and nothing attached to it."""
    if type(parameter) is not nn.Parameter or parameter.is_inference() or not parameter.is_contiguous():
        return False
    if parameter.grad is not None or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return False
    # Two hold its memory, the parameter and `storage`. Another tensor on it would not see later changes.
    storage = parameter.untyped_storage()
    is_alone = torch._C._storage_Use_Count(storage._cdata) == 2 and storage.nbytes() == parameter.nbytes
    return is_alone and not weakref.getweakrefs(parameter)


def _unpacked(weight: ReleasedWeight, copy: PackedCopy) -> torch.Tensor:
    try:
        with torch.inference_mode(False), torch.no_grad():
            numbers = torch.empty(weight.shape, dtype=weight.dtype)
            copy.read(numbers)
            return numbers
    except RuntimeError as error:
        raise ReleasedWeightError(f"a released parameter cannot be restored: {error}") from error
