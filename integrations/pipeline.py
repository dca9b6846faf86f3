"""`hfpaged.patch(pipe)`: a text-generation pipeline that feeds its inputs to the engine as fast as it takes them.

A stock pipeline generates one prompt at a time, or fixed batches of `batch_size`. A patched one keeps many calls of
`model.generate` in flight at once, on threads, and lets the engine batch them: results come in order, through the
pipeline's own preprocessing and postprocessing, and lazy inputs are read only a bounded number ahead.

`python -m hfpaged.integrations.pipeline [MODEL]` is an example.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tqdm.auto import tqdm
from transformers import TextGenerationPipeline

import hfpaged
from hfpaged.generation.cancel_scope import CancelScope
from hfpaged.integrations.example import load, parse, show
from hfpaged.patched_model import engine, is_patched
from hfpaged.runtime.patched_class import patched_class, unpatched_class


def paged_pipeline_class(original: type[TextGenerationPipeline]) -> type[TextGenerationPipeline]:
    """A class that looks like `original` to every check, but whose inputs go to the engine together."""
    return patched_class(original, get_iterator=_get_iterator)


def _get_iterator(
    pipe: TextGenerationPipeline,
    inputs: Iterable[Any],
    num_workers: int,
    batch_size: int,
    preprocess_params: dict[str, Any],
    forward_params: dict[str, Any],
    postprocess_params: dict[str, Any],
) -> Iterator[Any]:
    """Results of `inputs`, in order. `num_workers` and `batch_size` have nothing left to do.

    Closing the iterator cancels what is in flight. `hfpaged={"progress": True}` among the generate options shows a
    progress bar.
    """
    if not is_patched(pipe.model):
        return unpatched_class(pipe).get_iterator(
            pipe, inputs, num_workers, batch_size, preprocess_params, forward_params, postprocess_params
        )
    options = dict(forward_params.get("hfpaged") or {})
    progress = options.pop("progress", False)
    scope = CancelScope()
    forward_params = {**forward_params, "hfpaged": {**options, "scope": scope}}

    def generate(prompt: Any) -> Any:
        return pipe.forward(pipe.preprocess(prompt, **preprocess_params), **forward_params)

    outputs = _ordered(generate, _items(inputs), engine(pipe.model).config.max_requests, scope)
    results = _postprocessed(pipe, outputs, postprocess_params)
    if progress:
        results = iter(tqdm(results, total=len(inputs) if hasattr(inputs, "__len__") else None, unit=" prompts"))
    return results


def _postprocessed(pipe: TextGenerationPipeline, outputs: Iterator[Any], params: dict[str, Any]) -> Iterator[Any]:
    try:
        for output in outputs:
            yield pipe.postprocess(output, **params)
    finally:
        # A generator that is dropped half way closes the one it reads from only by being collected.
        outputs.close()


def _ordered(generate: Any, prompts: Iterator[Any], look_ahead: int, scope: CancelScope) -> Iterator[Any]:
    """Results in the order of the prompts, of which at most `look_ahead` are read beyond the last result."""
    in_flight: deque[Future] = deque()
    with ThreadPoolExecutor(look_ahead, thread_name_prefix="hfpaged-pipeline") as pool:
        try:
            for prompt in prompts:
                in_flight.append(pool.submit(generate, prompt))
                if len(in_flight) == look_ahead:
                    yield in_flight.popleft().result()
            while in_flight:
                yield in_flight.popleft().result()
        finally:
            scope.cancel()
            for future in in_flight:
                future.cancel()


def _items(inputs: Any) -> Iterator[Any]:
    """The elements of a list, generator or Dataset; a Dataset may know only its length and its items."""
    if hasattr(inputs, "__iter__"):
        return iter(inputs)
    return (inputs[index] for index in range(len(inputs)))


PROMPTS = ("The capital of France is", "A haiku about the sea:", "One, two, three,", "My favourite colour is")


def main(arguments: Sequence[str] | None = None) -> None:
    """The example: a generator of prompts through a pipeline, one after the other on stock code and all at once."""
    parsed = parse("A generator of prompts through a text-generation pipeline, stock and patched.", arguments)
    model, tokenizer = load(parsed.model)
    pipe = TextGenerationPipeline(model=model, tokenizer=tokenizer)

    def texts() -> Iterator[str]:
        options = {"max_new_tokens": parsed.new_tokens, "do_sample": False, "return_full_text": False}
        return (result[0]["generated_text"] for result in pipe((prompt for prompt in PROMPTS), **options))

    stock = list(texts())
    with hfpaged.patched(pipe):
        for prompt, text, expected in zip(PROMPTS, texts(), stock, strict=True):
            show(prompt[:17], text, text == expected)
        print(f"steps: {engine(pipe).stats()['steps']}")


if __name__ == "__main__":
    main()
