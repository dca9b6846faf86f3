"""LiveRequest: all that the stepping thread knows of a request that has not ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from hfpaged.core.request import Request
from hfpaged.runtime.handle import GenerationHandle
from hfpaged.runtime.request_spec import RequestSpec
from hfpaged.sampling.draw_table import DrawSettings
from hfpaged.sampling.sampler import SampleRow


@dataclass(slots=True)
class LiveRequest:
    """What was asked for, its caller's handle, and its place in the books.

    Attributes:
        row: how its next token is drawn.
        draw: how a device can draw its tokens; None: only the host can.
        wants_logits: whether it wants more than the argmax of its logits.
    """

    spec: RequestSpec
    handle: GenerationHandle
    request: Request
    row: SampleRow
    draw: DrawSettings | None = None
    wants_logits: bool = field(init=False)

    def __post_init__(self) -> None:
        self.wants_logits = self.spec.steered or self.spec.logprobs is not None or not self.row.is_argmax

    @classmethod
    def of(cls, spec: RequestSpec, handle: GenerationHandle, cache_root: bytes | None) -> LiveRequest:
        """A request that begins.

        Args:
            cache_root: see `Request`.
        """
        request = Request(
            id=handle.request_id,
            tokens=list(spec.prompt),
            prompt_len=len(spec.prompt),
            max_tokens=spec.max_tokens,
            priority=spec.priority,
            arrival=handle.request_id,
            cache_root=cache_root,
            draft_tokens=spec.logits_for - 1,
        )
        if spec.prompt_logprobs is not None:
            handle.add_prompt_logprobs([None])
            request.score_from = 0 if len(spec.prompt) > 1 else None
        row = SampleRow(
            tokens=request.tokens,
            processors=spec.processors,
            do_sample=spec.do_sample,
            seed=spec.seed,
            sample_index=spec.sample_index,
            keep_scores=spec.keep_scores or spec.keep_logits,
        )
        return cls(spec, handle, request, row, DrawSettings.of(row) if spec.logprobs is None else None)
