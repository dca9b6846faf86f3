"""Example: answers bound by a regular expression through Outlines, several at once from threads. Run as a program.

`python -m hfpaged.integrations.outlines [MODEL]` wraps a model with `outlines.from_transformers` as usual, and asks for
the year of three events, on stock `generate()` one by one and patched all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import hfpaged
from hfpaged.integrations.example import load, parse, require, show

EVENTS = ("the first moon landing", "the fall of the Berlin wall", "the French revolution")
YEAR = "1[0-9]{3}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The example."""
    outlines = require("outlines", "outlines")
    parsed = parse(__doc__.splitlines()[0], arguments)
    model, tokenizer = load(parsed.model)
    wrapped = outlines.from_transformers(model, tokenizer)

    def year(event: str) -> str:
        # A generator keeps the state of one call at a time.
        generator = outlines.Generator(wrapped, outlines.types.Regex(YEAR))
        return generator(f"The year of {event} is ", max_new_tokens=parsed.new_tokens, do_sample=False)

    stock = [year(event) for event in EVENTS]
    with hfpaged.patched(model), ThreadPoolExecutor(len(EVENTS)) as pool:
        for event, text, expected in zip(EVENTS, pool.map(year, EVENTS), stock, strict=True):
            show(event[:12], text, text == expected)


if __name__ == "__main__":
    main()
