"""Options of the attention interface that no tiny family of the other tests passes: sinks."""

from __future__ import annotations

import torch
from families import build_tiny
from program.stepping import Stepper
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from hfpaged.program.program import StepProgram
from hfpaged.program.trace import trace_forward

PROMPT = [5, 9, 14, 22, 3, 70, 41, 8]


class AttentionWithSinks(LlamaAttention):
    """Llama's attention with one extra logit per head, as GPT-OSS has."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (projection(hidden_states).view(shape).transpose(1, 2) for projection in projections)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, s_aux=self.sinks)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights


def with_sinks() -> nn.Module:
    model = build_tiny("llama")
    generator = torch.Generator().manual_seed(4)
    for layer in model.model.layers:
        layer.self_attn.__class__ = AttentionWithSinks
        layer.self_attn.sinks = nn.Parameter(torch.randn(4, generator=generator) * 2)
    return model


def logits(program: StepProgram) -> torch.Tensor:
    stepper = Stepper(program, max_requests=1)
    stepper.prefill(stepper.add(PROMPT), chunk=3)
    return stepper.requests[0].logits[-1]


def test_sinks_are_recognized_and_follow_the_parameter():
    model = with_sinks()
    program = StepProgram.build(model, num_threads=1)
    assert program.description.layers[0].attention.sinks == "sinks"
    before = logits(program)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.add_(3)
    assert torch.equal(logits(program), before)
    program.repack()
    rebuilt = StepProgram.build(model, num_threads=1)
    assert not torch.allclose(before, logits(program), atol=1e-3)
    assert torch.equal(logits(program), logits(rebuilt))


def test_the_trace_attends_with_the_options_it_was_given():
    trace = trace_forward(with_sinks())
    assert all(call.sinks is not None and call.window == 0 and call.softcap == 0 for call in trace.attention)
    window = trace_forward(build_tiny("mistral"))
    assert {call.window for call in window.attention} == {8}
    capped = trace_forward(build_tiny("gemma2"))
    assert {call.softcap for call in capped.attention} == {50.0}
    assert {call.window for call in capped.attention} == {0, 8}
