"""SmolLM2 on two threads. The speeds mean something on an idle machine only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quiet import torch_threads
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hfpaged


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_path)


@pytest.fixture
def model(smollm2_path: Path) -> Iterator[PreTrainedModel]:
    """Unpatched, in float32."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    model.generation_config.pad_token_id = model.generation_config.eos_token_id
    yield model
    hfpaged.unpatch(model)
