"""Generate from several prompts with the engine, then without it, and compare texts and speed.

The prompts run as one generate() call. A text counts as equal when it is token for token what stock generate() gives
for the same batch or, where padding changes stock's own rounding, for that prompt alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
from transformers import BatchEncoding, PreTrainedModel, set_seed

import hfpaged
from hfpaged.cli.arguments import add_model_options, positive_float, positive_int, seed, share
from hfpaged.cli.prompts import DEFAULT_PROMPTS, encode, last_line
from hfpaged.errors import InputError
from hfpaged.models.end_tokens import end_tokens
from hfpaged.models.loading import load, set_threads

NAME = "generate"
SUMMARY = "generate from several prompts, with the engine and without"

TICK, CROSS = "✓", "✗"


class Generation(NamedTuple):
    """New tokens of each prompt, up to and with the first end-of-sequence token, and the seconds of the call."""

    rows: list[list[int]]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(row) for row in self.rows)

    @property
    def rate(self) -> float:
        """New tokens per second."""
        return self.tokens / self.seconds

    def speed(self) -> str:
        return f"{self.tokens} tokens in {self.seconds:.2f} s, {self.rate:.1f} tokens/s"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: six questions of unequal length")
    add_model_options(parser, default_dtype="float32")
    parser.add_argument(
        "--max-new-tokens", type=positive_int, default=48, metavar="N", help="for each prompt (default: %(default)s)"
    )
    parser.add_argument("--no-compare", action="store_true", help="do not run stock generate() beside it")
    sampling = parser.add_argument_group("sampling (greedy otherwise)")
    sampling.add_argument("--sample", action="store_true", help="sample; texts then differ from stock's by chance")
    sampling.add_argument("--temperature", type=positive_float, metavar="T")
    sampling.add_argument("--top-k", type=positive_int, metavar="K")
    sampling.add_argument("--top-p", type=share, metavar="P")
    sampling.add_argument("--seed", type=seed, default=0, metavar="S", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Returns 1 where a greedy float32 text differs from stock's, else 0."""
    options = generation_options(args)
    threads = set_threads(args.threads)
    model, tokenizer, label = load(args.model, args.dtype)
    prompts = args.prompts or DEFAULT_PROMPTS
    inputs = encode(tokenizer, prompts).to(model.device)
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    print(f"model    {label}, {args.dtype}, {model.device.type}, {threads} threads")
    print(
        f"prompts  {len(prompts)} of {min(lengths)} to {max(lengths)} tokens, {args.max_new_tokens} new tokens at most"
    )

    patched, prefix_hits = generate_patched(model, inputs, options, args.seed)
    for number, (prompt, row) in enumerate(zip(prompts, patched.rows, strict=True), start=1):
        print(f"\n[{number}] {last_line(prompt)}\n{tokenizer.decode(row, skip_special_tokens=True).strip()}")
    print(f"\npatched  {patched.speed()}, prefix hits: {prefix_hits} of {sum(lengths)} prompt tokens")
    if args.no_compare:
        return 0

    warm_up(model, inputs)
    stock = generate(model, inputs, options, args.seed)
    print(f"stock    {stock.speed()}")
    print(f"ratio    {patched.rate / stock.rate:.2f} times stock's tokens/s")
    if args.sample:
        print("texts    sampled: they differ by chance, for the engine has a random stream of its own")
        return 0
    return report_equality(equal_rows(model, inputs, options, patched, stock), args.dtype)


def report_equality(equal: Sequence[bool], dtype: str) -> int:
    """Print which texts are stock's; returns 1 where a float32 one is not, else 0."""
    print(f"texts    {' '.join(TICK if same else CROSS for same in equal)}  {sum(equal)} of {len(equal)} as stock's")
    if all(equal):
        return 0
    if dtype != "float32":
        print(f"         ({dtype} rounds near ties either way; compare with --dtype float32)")
        return 0
    return 1


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for generate() from the command line."""
    sampling = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    given = {name: value for name, value in sampling.items() if value is not None}
    if given and not args.sample:
        raise InputError(f"--{next(iter(given)).replace('_', '-')} has no effect without --sample")
    return {"max_new_tokens": args.max_new_tokens, "do_sample": args.sample, **given}


def warm_up(model: PreTrainedModel, inputs: BatchEncoding) -> None:
    """Pay one-time costs (kernel choice, weight packing, memory) outside the timed call, on a prompt of one token."""
    first = {name: tensor[:1, -1:] for name, tensor in inputs.items()}
    model.generate(**first, max_new_tokens=2, do_sample=False)


def generate_patched(
    model: PreTrainedModel, inputs: BatchEncoding, options: dict[str, Any], seed: int
) -> tuple[Generation, int]:
    """Run `generate` on the engine; also returns how many prompt tokens came from the prefix cache."""
    with hfpaged.patched(model):
        warm_up(model, inputs)
        before = hfpaged.engine(model).stats()["cached_prompt_tokens"]
        generation = generate(model, inputs, options, seed)
        return generation, hfpaged.engine(model).stats()["cached_prompt_tokens"] - before


def generate(model: PreTrainedModel, inputs: BatchEncoding, options: dict[str, Any], seed: int) -> Generation:
    """Run one timed generate() call over the whole batch."""
    set_seed(seed)
    start = time.perf_counter()
    with torch.inference_mode():
        sequences = model.generate(**inputs, **options)
        new = sequences[:, inputs["input_ids"].shape[1] :].tolist()
    seconds = time.perf_counter() - start
    ends = end_tokens(model)
    return Generation([cut_after_end(row, ends) for row in new], seconds)


def generate_alone(model: PreTrainedModel, inputs: BatchEncoding, index: int, options: dict[str, Any]) -> Generation:
    """Run one prompt of the batch by itself, without its padding."""
    length = int(inputs["attention_mask"][index].sum())
    alone = BatchEncoding({name: tensor[index : index + 1, -length:] for name, tensor in inputs.items()})
    return generate(model, alone, options, seed=0)


def equal_rows(
    model: PreTrainedModel, inputs: BatchEncoding, options: dict[str, Any], patched: Generation, stock: Generation
) -> list[bool]:
    """For each prompt, whether the engine's tokens are stock's, for the batch or for the prompt alone."""
    return [
        ours == theirs or ours == generate_alone(model, inputs, index, options).rows[0]
        for index, (ours, theirs) in enumerate(zip(patched.rows, stock.rows, strict=True))
    ]


def cut_after_end(row: Sequence[int], ends: Container[int]) -> list[int]:
    """The row up to and with its first end token; padding follows it."""
    for index, token in enumerate(row):
        if token in ends:
            return list(row[: index + 1])
    return list(row)
