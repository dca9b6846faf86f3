"""Fixtures that many tests share: models, and what stock generate() says about them."""

from __future__ import annotations

import os

# Before transformers is imported: no test may wait for a network that is not there.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

# Before transformers imports Triton: where there is no GPU, its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
import transformers
from families import build_tiny
from transformers import PreTrainedModel

StockGreedy = Callable[[PreTrainedModel, Sequence[int], int], list[int]]

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """Factory `tiny_model(family, seed=0, **config_fields)`; every call builds a new model."""
    return build_tiny


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Directory of SmolLM2-135M-Instruct: $HFPAGED_TEST_MODEL, or where hfpaged keeps its default model."""
    named = os.environ.get("HFPAGED_TEST_MODEL")
    if named:
        return Path(named)
    from hfpaged.models.default_model import default_model

    return default_model().path


@pytest.fixture(scope="session")
def stock_greedy(request: pytest.FixtureRequest) -> StockGreedy:
    """`stock_greedy(model, prompt, n)`: the n new tokens stock greedy generate() gives this prompt alone.

    The model must not be patched. End-of-sequence does not end the text. Answers are kept on disk by the content of
    the weights, config and prompt, so later runs need not compute them.
    """
    folder = request.config.cache.mkdir("stock_greedy")

    def answer(model: PreTrainedModel, prompt: Sequence[int], n: int) -> list[int]:
        file = folder / f"{_question_key(model, prompt, n)}.json"
        if not file.exists():
            partial = file.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(_run_stock(model, prompt, n)))
            os.replace(partial, file)
        return json.loads(file.read_text())

    return answer


def _run_stock(model: PreTrainedModel, prompt: Sequence[int], n: int) -> list[int]:
    ids = torch.tensor([list(prompt)], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def _question_key(model: PreTrainedModel, prompt: Sequence[int], n: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([transformers.__version__, torch.__version__, list(prompt), n]).encode())
    digest.update(json.dumps([model.config.to_dict(), model.config._attn_implementation], default=str).encode())
    for name, tensor in model.state_dict().items():
        content = tensor.detach().cpu().contiguous().view(torch.uint8)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(content.numpy())
    return digest.hexdigest()
