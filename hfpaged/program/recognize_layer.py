"""Recognizes one decoder layer: which norm stands where, and how the branches join the residual stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from hfpaged.program.description import Experts, Layer, Mlp, Norm, NotRecognized, is_linear
from hfpaged.program.norms import identify_norm
from hfpaged.program.recognize_attention import calls_inside, recognize_attention
from hfpaged.program.recognize_experts import find_experts_call, recognize_experts
from hfpaged.program.recognize_mlp import recognize_mlp
from hfpaged.program.trace import AttentionCall, ModuleCall, Trace, same_memory


def layer_call(trace: Trace, attention: AttentionCall) -> ModuleCall:
    """The traced call of the decoder layer around an attention module: its ancestor in an `nn.ModuleList`.

    Raises:
        NotRecognized: there is none, or it runs more than once.
    """
    name = trace.calls_of(attention.module)[0].name
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        calls = [call for call in trace.calls if call.name == ".".join(parts[:end])]
        if parts[end - 1].isdigit():
            if len(calls) == 1:
                return calls[0]
            raise NotRecognized(f"{'.'.join(parts[:end])} runs {len(calls)} times in a forward")
    raise NotRecognized(f"{name} is not in a list of layers")


class LayerReader:
    """Reads one layer out of a trace. `read` is the entry point."""

    def __init__(self, trace: Trace, call: ModuleCall, attention: AttentionCall):
        self._trace = trace
        self._call = call
        self._attention = attention
        self._own = trace.calls_of(attention.module)[0]
        inside_attention = {id(inner) for inner in calls_inside(trace, self._own)} | {id(self._own)}
        self._outside = [inner for inner in calls_inside(trace, call) if id(inner) not in inside_attention]
        self._linears = [inner for inner in self._outside if is_linear(inner.module)]

    def read(self) -> Layer:
        """Describe the layer.

        Raises:
            NotRecognized: its data flow is none that the program can express.
        """
        attention = recognize_attention(self._trace, self._attention)
        mlp, mlp_call = self._recognize_mlp()
        start, mlp_input = self._call.input, mlp_call.input
        attention_norm = self._norm_before(self._own.input, start)
        attention_out_norm, attention_branch = self._norm_after(self._output_projection(attention.output.module))
        mlp_out_norm, mlp_branch = self._norm_after(mlp_call)
        shared = same_memory(mlp_input, self._own.input)
        mlp_source, mlp_norm = (start, None) if shared else self._source_of(mlp_input)
        parallel = shared or same_memory(mlp_source, start)
        multiplier = self._branch_multiplier(None if parallel else mlp_source, attention_branch, mlp_branch)
        if parallel and (attention_out_norm or mlp_out_norm or multiplier != 1.0 or isinstance(mlp, Experts)):
            raise NotRecognized(f"{self._call.name} has parallel branches with scales, norms or experts")
        return Layer(
            module=self._call.module,
            attention=attention,
            mlp=mlp,
            attention_norm=attention_norm,
            attention_out_norm=attention_out_norm,
            mlp_norm=mlp_norm,
            mlp_out_norm=mlp_out_norm,
            parallel=parallel,
            shared_norm=shared,
            branch_multiplier=multiplier,
        )

    def _recognize_mlp(self) -> tuple[Mlp | Experts, ModuleCall]:
        """The MLP or experts, and a call that reads what they read and returns what they return."""
        experts = find_experts_call(self._outside)
        if experts is None:
            mlp = recognize_mlp(self._call.name, self._linears)
            return mlp, replace(self._linears[-1], args=(self._linears[0].input,), kwargs={})
        if self._linears:
            raise NotRecognized(f"{self._call.name} has linear modules beside its experts")
        return recognize_experts(experts, self._outside), experts

    def _output_projection(self, module: nn.Module) -> ModuleCall:
        return self._trace.calls_of(module)[0]

    def _norm_before(self, tensor: torch.Tensor, source: torch.Tensor) -> Norm | None:
        found, norm = self._source_of(tensor)
        if not same_memory(found, source):
            raise NotRecognized(f"{self._call.name}: attention does not read the layer's input, plain or normalized")
        return norm

    def _source_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Norm | None]:
        """What `tensor` is the norm of, and that norm; `tensor` itself if it is no norm's output."""
        for call in self._outside:
            if same_memory(call.result, tensor) and not same_memory(call.input, tensor):
                return call.input, self._identify(call)
        return tensor, None

    def _norm_after(self, call: ModuleCall) -> tuple[Norm | None, torch.Tensor]:
        """The norm that reads a projection's output, and the branch as it joins the residual stream."""
        for reader in self._outside:
            if same_memory(reader.input, call.result) and not same_memory(reader.result, call.result):
                return self._identify(reader), reader.result
        return None, call.result

    def _identify(self, call: ModuleCall) -> Norm:
        if next(call.module.children(), None) is not None:
            raise NotRecognized(f"{call.name} ({type(call.module).__name__}) stands where a norm is expected")
        return identify_norm(call.module, call.input.shape[-1], call.input.dtype)

    def _branch_multiplier(
        self, middle: torch.Tensor | None, attention_branch: torch.Tensor, mlp_branch: torch.Tensor
    ) -> float:
        """The factor on both branches, such that the residual sums come out. `middle` None: a parallel layer."""
        start, end = self._call.input, self._call.result
        for factor in self._multipliers():
            attention, mlp = (branch if factor == 1.0 else branch * factor for branch in (attention_branch, mlp_branch))
            if middle is None:
                sums = [(mlp + attention + start, end)]
            else:
                sums = [(start + attention, middle), (middle + mlp, end)]
            if all(_close(a, b) for a, b in sums):
                return factor
        raise NotRecognized(f"{self._call.name}: its branches do not add up to its output")

    def _multipliers(self) -> Iterable[float]:
        named = (value for name, value in vars(self._call.module).items() if "multiplier" in name or "scal" in name)
        return dict.fromkeys([1.0, *(float(value) for value in named if isinstance(value, (int, float)))])


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal up to the order in which three numbers were added."""
    limit = 2 * torch.finfo(b.dtype).eps * b.float().abs().max().item()
    return (a.reshape(b.shape).float() - b.float()).abs().max().item() <= limit
