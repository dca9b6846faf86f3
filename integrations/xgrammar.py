"""Example: a grammar of its own for each row of a batch, with xgrammar's own logits processor. Run as a program.

`python -m hfpaged.integrations.xgrammar [MODEL]` asks three questions whose answers are bound by regular expressions,
on stock `generate()` and patched.
"""

from __future__ import annotations

from collections.abc import Sequence

import hfpaged
from hfpaged.integrations.example import load, parse, require, show

QUESTIONS = {
    "Is the sky blue? Answer: ": "(yes|no)",
    "How many legs does a spider have? Answer: ": "[1-9][0-9]?",
    "What colour is grass? Answer: ": "(red|green|blue)",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """The example."""
    xgrammar = require("xgrammar", "xgrammar")
    processors = require("xgrammar.contrib.hf", "xgrammar")
    parsed = parse(__doc__.splitlines()[0], arguments)
    model, tokenizer = load(parsed.model)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    compiler = xgrammar.GrammarCompiler(info)
    grammars = [compiler.compile_regex(pattern) for pattern in QUESTIONS.values()]
    inputs = tokenizer(list(QUESTIONS), return_tensors="pt", padding=True, padding_side="left")

    def answers() -> list[str]:
        # The processor keeps one matcher a row and serves one call.
        processor = processors.LogitsProcessor(grammars)
        out = model.generate(**inputs, max_new_tokens=parsed.new_tokens, do_sample=False, logits_processor=[processor])
        return tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    stock = answers()
    with hfpaged.patched(model):
        for question, text, expected in zip(QUESTIONS, answers(), stock, strict=True):
            show(QUESTIONS[question], text, text == expected)


if __name__ == "__main__":
    main()
