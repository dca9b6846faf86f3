"""Several LoRA adapters in one packed step: every token goes through the adapter of its own request.

PEFT's layers can mix adapters over the rows of a batch (`_mixed_batch_forward`). A packed step is one row of T tokens;
hooks on the engine view's layers turn it into T rows of one token, each with an adapter name, and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hfpaged.core.plan import Plan
from hfpaged.errors import InputError, UnsupportedOptionError

BASE = "__base__"


def adapter_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Layers that can tell rows apart by adapter name."""
    return (module for module in model.modules() if hasattr(module, "_mixed_batch_forward"))


def check_adapter(model: nn.Module, name: str) -> None:
    """Refuse an adapter that rows of `model` cannot have to themselves.

    Raises:
        InputError: there is none of that name.
        UnsupportedOptionError: PEFT itself cannot mix it: DoRA, adapters that are merged into the weights, or of a
            parameter of what is no linear module, such as a router.
    """
    layers = list(adapter_layers(model))
    known = {key for layer in layers for key in (*layer_adapters(layer), BASE)}
    if name not in known:
        raise InputError(f"there is no adapter {name!r} on this model; known: {', '.join(sorted(known)) or 'none'}")
    if any(getattr(layer, "merged", False) for layer in layers):
        raise UnsupportedOptionError("adapters are merged into the weights; call unmerge_adapter() to choose one a row")
    if any(hasattr(layer, "parameter_name") for layer in layers):
        raise UnsupportedOptionError("adapters of parameters (target_parameters) cannot be mixed in a batch by PEFT")
    if any((getattr(layer, "use_dora", None) or {}).get(name) for layer in layers):
        raise UnsupportedOptionError(
            f"adapter {name!r} is a DoRA adapter, which PEFT cannot mix with others in a batch"
        )


def layer_adapters(layer: nn.Module) -> Iterator[str]:
    """Names of the adapters that a layer has, as LoRA or as a copy of its own (`modules_to_save`)."""
    for attribute in ("lora_A", "lora_embedding_A", "_adapters"):
        yield from getattr(layer, attribute, ())


class AdapterRows:
    """Hooks on the adapter layers of an engine view. Used by the stepping thread only.

    Args:
        model: the view's model; the live model's layers are not touched, but what they know of adapters is shared.
    """

    def __init__(self, model: nn.Module):
        self._names: list[str] = []
        self._logit_names: list[str] = []
        self._layers = list(adapter_layers(model))
        self._hooks = []
        for layer in self._layers:
            self._hooks.append(layer.register_forward_pre_hook(self._before, with_kwargs=True))
            self._hooks.append(layer.register_forward_hook(self._after))

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def why_lost(self, name: str) -> str | None:
        """Why requests cannot go on through an adapter that they began with; None: they can."""
        if any(getattr(layer, "merged", False) for layer in self._layers):
            return "adapters were merged into the weights"
        # The live model's own records, which its layers share with the view's.
        records = (getattr(layer, "scaling", None) or getattr(layer, "_adapters", ()) for layer in self._layers)
        if name != BASE and not any(name in record for record in records):
            return f"adapter {name!r} was deleted"
        return None

    def assign(self, plan: Plan, adapters: Mapping[int, str]) -> None:
        """Name the adapter of each token of the next step, and of each that goes on into the model's head.

        Args:
            adapters: by request id.
        """
        self._names = [adapters[entry.id] for entry in plan.entries for _ in range(entry.num_tokens)]
        heads = [adapters[entry.id] for entry in plan.entries for _ in range(entry.logits_for)]
        self._logit_names = heads or self._names[:1]

    def _before(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """[1, T, ...] to [T, 1, ...], with a name for each."""
        inputs, *others = args
        if not _are_flat(inputs):
            inputs = inputs.transpose(0, 1)
        names = self._names if len(inputs) == len(self._names) else self._logit_names
        return (inputs, *others), {**kwargs, "adapter_names": names}

    def _after(self, layer: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return output if _are_flat(args[0]) else output.transpose(0, 1)


def _are_flat(inputs: torch.Tensor) -> bool:
    """Whether they are rows without a batch, [T, H], as some models make them of hidden states. Token ids are not."""
    return inputs.ndim == 2 and inputs.is_floating_point()
