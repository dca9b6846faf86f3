"""Example: the LM Evaluation Harness on a patched model. Run as a program.

`python -m hfpaged.integrations.lm_eval [MODEL]` puts a model into the harness's own `HFLM`, which scores some texts and
generates others, on stock code and patched. Tasks of the harness run in the same way: give what `harness` returns to
`lm_eval.simple_evaluate(model=...)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hfpaged
from hfpaged.integrations.example import load, parse, require, show

CHOICES = (("The capital of France is", " Paris"), ("The capital of France is", " Berlin"), ("Two and two is", " four"))
QUESTIONS = ("Question: What is the capital of Italy?\nAnswer:", "Question: Is ice cold?\nAnswer:", "One, two, three,")


def harness(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int = 4) -> Any:
    """The harness's model around a live one, patched or not."""
    wrapper = require("lm_eval.models.huggingface", '"lm-eval[hf]"')
    return wrapper.HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)


def requests(kind: str, arguments: Sequence[tuple]) -> list[Any]:
    """Requests as a task of the harness makes them."""
    instance = require("lm_eval.api.instance", '"lm-eval[hf]"').Instance
    return [instance(request_type=kind, doc={}, arguments=each, idx=index) for index, each in enumerate(arguments)]


def results(lm: Any, new_tokens: int) -> tuple[list[tuple[float, bool]], list[str]]:
    """(log-likelihood, whether it is the greedy text) of each choice, and the answer to each question."""
    options = {"until": ["\n"], "max_gen_toks": new_tokens, "do_sample": False}
    scores = lm.loglikelihood(requests("loglikelihood", CHOICES), disable_tqdm=True)
    texts = lm.generate_until(
        requests("generate_until", [(question, options) for question in QUESTIONS]), disable_tqdm=True
    )
    return scores, texts


def main(arguments: Sequence[str] | None = None) -> None:
    """The example."""
    parsed = parse(__doc__.splitlines()[0], arguments)
    model, tokenizer = load(parsed.model)
    lm = harness(model, tokenizer)
    stock_scores, stock_texts = results(lm, parsed.new_tokens)
    with hfpaged.patched(model):
        scores, texts = results(lm, parsed.new_tokens)
    for (context, choice), score, expected in zip(CHOICES, scores, stock_scores, strict=True):
        show(f"{score[0]:.3f}", context + choice, score == expected)
    for question, text, expected in zip(QUESTIONS, texts, stock_texts, strict=True):
        show(question[-12:], text, text == expected)


if __name__ == "__main__":
    main()
