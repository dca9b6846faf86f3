"""Lists that Transformers itself builds, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.utils import GenerationMixin

VOCAB = 211

StockProcessors = Callable[..., LogitsProcessorList]


class Modelless(GenerationMixin):
    """As much of a model as `_get_logits_processor` reads."""

    config = SimpleNamespace(
        is_encoder_decoder=False, get_text_config=lambda: SimpleNamespace(vocab_size=VOCAB), max_position_embeddings=512
    )


@pytest.fixture(autouse=True)
def one_seeded_thread() -> Iterator[None]:
    """Every run has the same numbers, and the tensors here are too small to share among threads."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def stock_processors() -> StockProcessors:
    """`stock_processors(prompt, **generation_options)`: what Transformers builds for this prompt alone."""

    def build(prompt: list[int], **options: object) -> LogitsProcessorList:
        allowed = options.pop("prefix_allowed_tokens_fn", None)
        config = GenerationConfig(**options)
        eos = config.eos_token_id
        config._eos_token_tensor = None if eos is None else torch.tensor(eos).reshape(-1)
        config.num_beams, config.num_return_sequences = 1, 1
        ids = torch.tensor([prompt])
        return Modelless()._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=ids,
            prefix_allowed_tokens_fn=allowed,
            device="cpu",
            model_kwargs={"attention_mask": torch.ones_like(ids)},
        )

    return build
