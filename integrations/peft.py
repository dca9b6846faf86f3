"""`hfpaged.patch(peft_model)`: `generate(..., adapter_names=...)` from any number of threads.

PEFT would keep the names of a call in hooks on the model, which do not say whose call it is. A patched PeftModel hands
them on as options of the call itself.

`python -m hfpaged.integrations.peft [MODEL]` adds two random adapters to a model (the default one if none is named),
sends one prompt through each of them and through the bare model at once, and shows that each text is the same alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel

import hfpaged
from hfpaged.generation.adapters import carry_names
from hfpaged.generation.readers import reader_released
from hfpaged.integrations.example import load, parse, require
from hfpaged.patched_model import is_patched
from hfpaged.runtime.patched_class import patched_class, reduce_to_unpatched, unpatched_class

BASE = "__base__"


def paged_peft_class(original: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A class that looks like `original`, a PeftModel's, to every check, and whose calls carry their adapter names."""
    return patched_class(original, generate=_generate, __reduce_ex__=reduce_to_unpatched)


def _generate(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    # PEFT checks some things before it calls the model's own method, which looks after its readers itself.
    with reader_released(GenerationMixin.generate, (self, *args), kwargs):
        if kwargs.get("adapter_names") is not None and _can_carry_names(self, kwargs):
            carry_names(kwargs, list(kwargs.pop("adapter_names")))
        return unpatched_class(self).generate(self, *args, **kwargs)


def _can_carry_names(model: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether the call's adapters are LoRA's, active, and nothing but the engine or Transformers will decode it."""
    is_lora = hasattr(model.base_model, "_enable_peft_forward_hooks") and model.has_active_enabled_adapter
    return is_lora and is_patched(model) and not model.training and kwargs.get("custom_generate") is None


def add_random_adapters(model: PreTrainedModel, names: Sequence[str]) -> torch.nn.Module:
    """The model with LoRA adapters of these names, as if each had been trained on something else."""
    peft = require("peft", "peft")
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    peft_model = peft.get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        peft_model.add_adapter(name, config)
    return peft_model.eval()


def answers(model: torch.nn.Module, prompt_ids: list[int], names: Sequence[str], num_new: int) -> list[list[int]]:
    """New token ids of one greedy request for each adapter, all running at once."""
    engine = hfpaged.engine(model)
    handles = [
        engine.submit(prompt_ids, max_new_tokens=num_new, do_sample=False, hfpaged={"adapter": name}) for name in names
    ]
    return [handle.result() for handle in handles]


def main(arguments: Sequence[str] | None = None) -> None:
    """The example."""
    parsed = parse(__doc__.splitlines()[0], arguments)
    plain, tokenizer = load(parsed.model)
    model = hfpaged.patch(add_random_adapters(plain, ["first", "second"]))
    names = ["first", "second", BASE]
    prompt = tokenizer("The three primary colours are")["input_ids"]
    together = answers(model, prompt, names, parsed.new_tokens)
    for name, text in zip(names, together, strict=True):
        alone = answers(model, prompt, [name], parsed.new_tokens)[0]
        print(f"{name:9} {'as alone' if text == alone else 'DIFFERS'}  {tokenizer.decode(text)!r}")
    print(f"steps: {hfpaged.engine(model).stats()['steps']}")


if __name__ == "__main__":
    main()
