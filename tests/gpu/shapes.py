"""Models in the shapes of well-known ones, with random weights: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

_COMMON: dict[str, Any] = {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    },
    "smollm2-135m": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 1e5,
    },
    "llama-3-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 16384, "rope_theta": 5e5,
    },
}  # fmt: skip


def random_model(shape: str, device: torch.device, dtype: torch.dtype, layers: int | None = None) -> LlamaForCausalLM:
    """A model built on the device in its dtype.

    Args:
        layers: fewer than the shape has.
    """
    fields = {**_COMMON, **SHAPES[shape]}
    if layers is not None:
        fields["num_hidden_layers"] = layers
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = LlamaForCausalLM(LlamaConfig(**fields)).eval()
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    # Larger than usual, so that greedy text is not one repeated token.
                    torch.nn.init.normal_(parameter, std=1.6 / parameter.shape[1] ** 0.5)
    finally:
        torch.set_default_dtype(before)
    return model


def bytes_of_weights(model: torch.nn.Module) -> int:
    """What a decode step has to read beside keys and values, the embedding table aside."""
    embedding = model.get_input_embeddings().weight
    return sum(p.numel() * p.element_size() for p in model.parameters() if p is not embedding)
