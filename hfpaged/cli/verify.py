"""Answer "why is the text different?": stock and patched greedy text of one prompt, and where they part.

At the first token that differs, both sides' two best candidates are shown with the gap between their logits. A gap
within the rounding of the dtype is a near tie that either side may break; a larger one is a bug worth reporting.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hfpaged
from hfpaged.cli.arguments import add_model_options, positive_int
from hfpaged.models.loading import load, set_threads

NAME = "verify"
SUMMARY = "compare stock and patched text of a prompt, token by token"

BEFORE_AND_AFTER = 8


class GreedyText(NamedTuple):
    """New token ids, and the raw logits, fp32 [V], that each was chosen by."""

    tokens: list[int]
    logits: tuple[torch.Tensor, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT")
    add_model_options(parser, default_dtype="float32")
    parser.add_argument("--max-new-tokens", type=positive_int, default=64, metavar="N", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Returns 0 if the texts are equal, else 1."""
    set_threads(args.threads)
    model, tokenizer, label = load(args.model, args.dtype)
    ids = tokenizer(args.prompt, return_tensors="pt")["input_ids"].to(model.device)
    print(f"model    {label}, {args.dtype}, {ids.shape[1]} prompt tokens")
    stock = greedy(model, ids, args.max_new_tokens)
    with hfpaged.patched(model):
        patched = greedy(model, ids, args.max_new_tokens)
        stats = hfpaged.engine(model).stats()
        print(f"engine   tier {stats['tier']}, attention {stats['backend']}")
        for reason, count in stats["fallbacks"].items():
            print(f"         {count} call(s) ran on stock code: {reason}")
    first = first_difference(stock.tokens, patched.tokens)
    if first is None:
        print(f"texts    equal, {len(stock.tokens)} tokens\n\n{tokenizer.decode(stock.tokens)}")
        return 0
    print(f"texts    equal for {first} tokens, then they part\n")
    for name, text in (("stock", stock), ("patched", patched)):
        print(f"{name:8} {excerpt(tokenizer, text.tokens, first)}")
    print()
    for name, text in (("stock", stock), ("patched", patched)):
        print(f"{name:8} {margin(tokenizer, text.logits[first])}")
    return 1


def greedy(model: PreTrainedModel, ids: torch.LongTensor, max_new_tokens: int) -> GreedyText:
    """Greedy text of one prompt, [1, L] ids, with the logits of each step."""
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return GreedyText(output.sequences[0, ids.shape[1] :].tolist(), tuple(step[0] for step in output.logits))


def first_difference(stock: list[int], patched: list[int]) -> int | None:
    """Index of the first token in which the texts differ; None if they are equal."""
    for index, (theirs, ours) in enumerate(zip(stock, patched, strict=False)):
        if theirs != ours:
            return index
    return None if len(stock) == len(patched) else min(len(stock), len(patched))


def margin(tokenizer: PreTrainedTokenizerBase, logits: torch.Tensor) -> str:
    """The two best candidates and the gap between them."""
    values, ids = logits.float().topk(2)
    best, second = (repr(tokenizer.decode([token])) for token in ids.tolist())
    return f"{best} {values[0]:.4f} before {second} {values[1]:.4f}, a gap of {values[0] - values[1]:.2e}"


def excerpt(tokenizer: PreTrainedTokenizerBase, tokens: list[int], index: int) -> str:
    """The text around a token, which is set in brackets."""
    before = tokenizer.decode(tokens[max(0, index - BEFORE_AND_AFTER) : index])
    after = tokenizer.decode(tokens[index + 1 : index + 1 + BEFORE_AND_AFTER])
    here = tokenizer.decode(tokens[index : index + 1]) if index < len(tokens) else "end"
    return f"... {before}[{here}]{after} ...".replace("\n", "\\n")
