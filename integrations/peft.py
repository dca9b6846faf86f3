"""Example: several LoRA adapters of one model, all answering in the same steps. Run as a program.

`python -m hfpaged.integrations.peft [MODEL]` adds two random adapters to a model (the default one if none is named),
sends one prompt through each of them and through the bare model at once, and shows that each text is the same alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

import hfpaged
from hfpaged.integrations.example import load, parse, require

BASE = "__base__"


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
