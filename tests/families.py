"""Tiny random models, one for each kind of decoder that the engine has to treat differently."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 128
PAD, BOS, EOS = 0, 1, 2

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    # A tied head prefers the token it has just seen, which makes greedy text one repeated token.
    "tie_word_embeddings": False,
}
_GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# Model type -> what its config needs beside, or instead of, the base.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "olmo2": {},
    "phi3": {},
    "gemma": {},
    "granite": {},
    "glm4": {},
    "starcoder2": {},
    "stablelm": {},
    "gpt_neox": {},
    "gpt2": _GPT2,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "cohere2": {"sliding_window": 8},
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": 2},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": _EXPERTS,
    "llama4_text": {"attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 64},
    "deepseek_v3": {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "gemma3n_text": {
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "num_kv_shared_layers": 1,
        "sliding_window": 8,
        "laurel_rank": 8,
    },
    "bloom": {"n_layer": 4, "n_head": 4},
    "falcon": {"alibi": False, "new_decoder_architecture": False, "multi_query": False},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba": {"state_size": 8},
}

# Their configs know one head count and derive the head size from it.
_PLAIN_HEADS = frozenset({"gpt2", "gpt_neox", "opt", "bloom", "falcon"})


def build_tiny(family: str, seed: int = 0, std: float = 0.15, **overrides: Any) -> PreTrainedModel:
    """A new model in fp32, eval mode and eager attention.

    Args:
        family: a key of FAMILIES.
        seed: of the weights; the global random state is left as it was.
        std: of the weight matrices. The usual 0.02 makes greedy text one repeated token.
        overrides: config fields.
    """
    fields = {**_BASE, **FAMILIES[family], **overrides}
    if family in _PLAIN_HEADS:
        fields = {name: value for name, value in fields.items() if name not in ("num_key_value_heads", "head_dim")}
    config = AutoConfig.for_model(family, **fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=std)
    return model


def build_uneven(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """A tiny model whose norms and biases are not ones and zeros: those would hide a wrong formula."""
    model = build_tiny(family, **overrides).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.1).to(dtype))
    return model
