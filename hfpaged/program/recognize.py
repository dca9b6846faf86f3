"""Recognizes a whole decoder from one traced forward of the live modules."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpaged.program.description import Layer, Linear, LogitScaling, Model, NotRecognized
from hfpaged.program.norms import identify_norm
from hfpaged.program.recognize_layer import LayerReader, layer_call
from hfpaged.program.trace import AttentionCall, ModuleCall, Trace, same_memory

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def recognize_model(model: PreTrainedModel, trace: Trace) -> Model:
    """Describe `model` by what its traced forward did.

    Raises:
        NotRecognized: some part of it has no counterpart among the program's operations.
    """
    if not trace.attention:
        raise NotRecognized("none of its layers calls Transformers' attention interface")
    calls = [layer_call(trace, attention) for attention in trace.attention]
    for before, after in itertools.pairwise(calls):
        if not same_memory(before.result, after.input):
            raise NotRecognized(f"{after.name} does not read what {before.name} returns")
    dtype = calls[0].input.dtype
    if dtype not in DTYPES:
        raise NotRecognized(f"its activations are {dtype}; the program has float32, bfloat16 and float16")
    layers = [_read_layer(trace, *pair) for pair in zip(calls, trace.attention, strict=True)]
    final = _reader_of(trace, calls[-1].result)
    head = _head_call(model, trace, final)
    return Model(
        dtype=dtype,
        hidden_size=calls[0].input.shape[-1],
        embedding=model.get_input_embeddings(),
        embedding_scale=_embedding_scale(model, trace, calls[0].input),
        layers=tuple(layers),
        final_norm=identify_norm(final.module, final.input.shape[-1], dtype),
        head=Linear(head.module),
        logit_scaling=_logit_scaling(model, head.result, trace.logits),
    )


def _read_layer(trace: Trace, call: ModuleCall, attention: AttentionCall) -> Layer:
    try:
        return LayerReader(trace, call, attention).read()
    except NotRecognized as error:
        if call.name in error.reason:
            raise
        raise NotRecognized(f"{call.name}: {error.reason}") from error


def _reader_of(trace: Trace, hidden: torch.Tensor) -> ModuleCall:
    for call in trace.calls:
        if same_memory(call.input, hidden) and not same_memory(call.result, hidden):
            return call
    raise NotRecognized("nothing normalizes the last layer's output")


def _head_call(model: PreTrainedModel, trace: Trace, final: ModuleCall) -> ModuleCall:
    head = model.get_output_embeddings()
    calls = trace.calls_of(head) if type(head) is nn.Linear else []
    if len(calls) != 1 or not torch.equal(calls[0].input.flatten(), final.result.flatten()):
        raise NotRecognized("its head is not one linear module on the final norm")
    return calls[0]


def _embedding_scale(model: PreTrainedModel, trace: Trace, hidden: torch.Tensor) -> float:
    embedding = model.get_input_embeddings()
    rows = embedding.weight[trace.token_ids].detach()
    if embedding.max_norm is not None:
        raise NotRecognized("its embedding renormalizes its rows")
    for scale in _scales((embedding, model.base_model), rows.dtype):
        if torch.equal(rows if scale == 1.0 else rows * scale, hidden.reshape(rows.shape)):
            return scale
    raise NotRecognized("the first layer does not read the token embedding, plain or scaled")


def _scales(modules: Iterable[nn.Module], dtype: torch.dtype) -> list[float]:
    """1 and every number of the modules that is named like a factor, as it is and rounded to the dtype."""
    found = [1.0]
    for module in modules:
        for name, value in (*vars(module).items(), *module.named_buffers(recurse=False)):
            if ("scale" in name or "multiplier" in name) and not isinstance(value, bool):
                if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                    found += [float(torch.tensor(float(value)).to(dtype)), float(value)]
    return list(dict.fromkeys(found))


def _logit_scaling(model: PreTrainedModel, raw: torch.Tensor, logits: torch.Tensor) -> LogitScaling:
    """What turns the head's output into the model's logits, of what its config names."""
    raw, config = raw.reshape(logits.shape), model.config.get_text_config()
    multiplier = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    softcap = getattr(config, "final_logit_softcapping", None) or 0.0
    for candidate in itertools.product({1.0, float(multiplier)}, {1.0, float(divisor)}, {0.0, float(softcap)}):
        scaling = LogitScaling(*candidate)
        if torch.allclose(_scaled(raw, scaling), logits, rtol=1e-5, atol=1e-5):
            return scaling
    raise NotRecognized("its logits are not the head's output, plain, scaled or softcapped")


def _scaled(logits: torch.Tensor, scaling: LogitScaling) -> torch.Tensor:
    if scaling.multiplier != 1.0:
        logits = logits * scaling.multiplier
    if scaling.divisor != 1.0:
        logits = logits / scaling.divisor
    return torch.tanh(logits / scaling.softcap) * scaling.softcap if scaling.softcap else logits
