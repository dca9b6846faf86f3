"""Example: the format of each answer by lm-format-enforcer, several at once from threads. Run as a program.

`python -m hfpaged.integrations.lm_format_enforcer [MODEL]` has JSON written by a schema after three prompts, on stock
`generate()` one by one and patched all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import torch
from transformers import PreTrainedTokenizerBase

import hfpaged
from hfpaged.integrations.example import load, parse, require, show

PEOPLE = ("Ada Lovelace", "Alan Turing", "Grace Hopper")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "born": {"type": "integer"}},
    "required": ["name", "born"],
}


def token_data(library: ModuleType, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> object:
    """What an enforcer has to know of the tokens; not all of its releases can read it from a tokenizer of today."""
    special = set(tokenizer.all_special_ids)
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer)) if token not in special}
    tokens = [(token, text, text.startswith(" ")) for token, text in texts.items()]
    return library.TokenEnforcerTokenizerData(tokens, tokenizer.decode, tokenizer.eos_token_id, False, vocab_size)


def main(arguments: Sequence[str] | None = None) -> None:
    """The example."""
    library = require("lmformatenforcer", "lm-format-enforcer")
    parsed = parse(__doc__.splitlines()[0], arguments)
    model, tokenizer = load(parsed.model)
    data = token_data(library, tokenizer, model.config.vocab_size)

    def allowed_tokens() -> Callable[[int, torch.Tensor], list[int]]:
        enforcer = library.TokenEnforcer(data, library.JsonSchemaParser(SCHEMA))
        return lambda row, ids: enforcer.get_allowed_tokens(ids.tolist()).allowed_tokens

    def describe(person: str) -> str:
        ids = tokenizer(f"{person} as JSON: ", return_tensors="pt")["input_ids"]
        options = {"max_new_tokens": parsed.new_tokens, "do_sample": False}
        out = model.generate(ids, **options, prefix_allowed_tokens_fn=allowed_tokens())
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    stock = [describe(person) for person in PEOPLE]
    with hfpaged.patched(model), ThreadPoolExecutor(len(PEOPLE)) as pool:
        for person, text, expected in zip(PEOPLE, pool.map(describe, PEOPLE), stock, strict=True):
            show(person, text, text == expected)


if __name__ == "__main__":
    main()
