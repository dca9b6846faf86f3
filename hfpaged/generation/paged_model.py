"""Decoding loops over the engine: a stand-in for the model, and a stand-in for its cache.

Beam search and assisted decoding are loops around `model(input_ids, cache=...)` that reorder and crop the cache.
`PagedModel` answers that call from the engine, and `PagedCache` turns reordering into copies of block tables and
cropping into freed blocks. The loops, Transformers' own or `BeamSearch`, run on the caller's thread and share the
engine's steps with everybody else.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from hfpaged.compat import causal_output
from hfpaged.errors import RequestCancelled
from hfpaged.generation.prompts import unpadded, vocabulary_size
from hfpaged.generation.request_options import RequestOptions
from hfpaged.runtime.engine import EngineCore
from hfpaged.runtime.handle import GenerationHandle
from hfpaged.runtime.request_spec import RequestSpec
from hfpaged.runtime.thread_state import ThreadState
from hfpaged.sampling.stop import StopRule


class PagedCache(Cache):
    """The rows of one decoding loop, as the cache that the loop believes to hold.

    A row is a steered request of the engine. Freed with `close`, or when the loop's caller closes it.
    """

    is_compileable = False
    is_croppable = True
    is_sliding: list[bool] = []
    is_linear: list[bool] = [False]
    is_dummy: list[bool] = []

    def __init__(self, engine: EngineCore):
        super().__init__(layers=[])
        self._engine = engine
        self.rows: list[GenerationHandle] = []
        self._padded_len = 0

    def __len__(self) -> int:
        return 0

    @property
    def is_initialized(self) -> bool:
        """Whether rows have been started."""
        return bool(self.rows)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of each row that are computed, left padding included."""
        return self._padded_len

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit of its own."""
        return -1

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i goes on from what was row `beam_idx[i]`. No keys or values are copied: forks share blocks."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self._select([row for row in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows."""
        self._select(indices.tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row; a positive number is a length to crop to."""
        count = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self._padded_len - tokens_to_remove)
        if count:
            self._engine.rollback(self.rows, count)
            self._padded_len -= count

    def activate_past_recording(self) -> None:
        """Nothing to do: rows can always be cropped."""

    def start(self, specs: list[RequestSpec], padded_len: int) -> None:
        """Begin the rows with their prompts."""
        self.rows = self._engine.submit_specs(specs)
        self._padded_len = padded_len

    def extend(self, tokens: list[list[int]], logits_for: int) -> None:
        """Append tokens to each row; the last `logits_for` of them get logits."""
        self._engine.feed(list(zip(self.rows, tokens, strict=True)), logits_for)
        self._padded_len += len(tokens[0])

    def logits(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for the logits that were asked for last: fp32 [B, k, V], in the memory of `out` if given."""
        taken = [row.take_logits() for row in self.rows]
        if any(logits is None for logits in taken):
            raise RequestCancelled("a row of this call was cancelled")
        return torch.stack(taken, out=out)

    def close(self) -> None:
        """End all rows and free their blocks."""
        self._engine.cancel(self.rows)

    def _select(self, sources: list[int]) -> None:
        # The first row that goes on from a source takes it over; further ones are forks; unused sources end.
        repeated = [row for n, row in enumerate(sources) if row in sources[:n]]
        forks = iter(self._engine.fork([self.rows[row] for row in repeated]) if repeated else [])
        unused = [handle for row, handle in enumerate(self.rows) if row not in set(sources)]
        self.rows = [next(forks) if row in sources[:n] else self.rows[row] for n, row in enumerate(sources)]
        self._engine.cancel(unused)


class PagedModel(GenerationMixin):
    """Looks like `model` to a decoding loop, but its forward runs on the engine.

    Args:
        options: per-request options of the call.
        max_length: padded length that no row will pass.
        repeats: how many neighbouring rows start from one prompt.
        adapters: one name a row; None: all rows go through those that are active.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: EngineCore,
        options: RequestOptions,
        max_length: int,
        repeats: int,
        adapters: list[str] | None,
    ):
        self._model = model
        self._options = options
        self._max_length = max_length
        self._repeats = repeats
        self._adapters = adapters
        self.paged_cache = PagedCache(engine)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        logits_to_keep: int = 1,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """One forward of the loop: [B, n] new tokens of every row. Returns logits [B, logits_to_keep, V]."""
        wanted = logits_to_keep or input_ids.shape[1]
        if not self.paged_cache.rows:
            self.start(input_ids, attention_mask, wanted)
        else:
            self.paged_cache.extend(input_ids.tolist(), wanted)
        return causal_output(self.paged_cache.logits().to(input_ids.device), self.paged_cache)

    def start(self, input_ids: torch.LongTensor, attention_mask: torch.Tensor | None, logits_for: int = 1) -> None:
        """Begin the rows of the cache with [B, L] prompts; the last `logits_for` tokens of each get logits."""
        self.paged_cache.start(self._specs(input_ids, attention_mask, logits_for), input_ids.shape[1])
        self._options.put_in_scope(self.paged_cache.rows)

    def _specs(self, input_ids: torch.LongTensor, mask: torch.Tensor | None, logits_for: int) -> list[RequestSpec]:
        prompts = unpadded(input_ids, mask, vocabulary_size(self._model))
        state = ThreadState.capture(self._model.device.type)
        room = self._max_length - input_ids.shape[1]
        return [
            RequestSpec(
                prompt=prompt,
                max_tokens=len(prompt) + room,
                stop=StopRule(),
                thread_state=state,
                steered=True,
                logits_for=logits_for,
                **self._options.of_all_rows(),
                adapter=None if self._adapters is None else self._adapters[row],
                fork_of=row - row % self._repeats if row % self._repeats else None,
            )
            for row, prompt in enumerate(prompts)
        ]
