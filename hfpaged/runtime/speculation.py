"""Speculation: the guesses ahead of all requests of one engine, wherever they come from."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from transformers import PreTrainedModel

from hfpaged.core.request import Request
from hfpaged.runtime.draft_model import DraftModel
from hfpaged.runtime.request_spec import LookupOptions, RequestSpec
from hfpaged.speculation.prompt_lookup import PromptLookup
from hfpaged.speculation.step_cost import StepCost


class Speculation:
    """Used by the stepping thread only. The engine of a model that drafts is kept for its cached prefixes.

    Attributes:
        step_cost: of the model that is guessed for; whoever steps it records every step there.
    """

    def __init__(self) -> None:
        self.step_cost = StepCost()
        self._draft_models: weakref.WeakKeyDictionary[PreTrainedModel, DraftModel] = weakref.WeakKeyDictionary()
        self._lookups: dict[int, PromptLookup] = {}
        self._drafted_by: dict[int, DraftModel] = {}
        self._requests: dict[int, Request] = {}
        self._most_guesses: dict[int, int] = {}

    def add(self, request: Request, spec: RequestSpec, make: Callable[[PreTrainedModel], DraftModel]) -> None:
        """A request was admitted: guess ahead for it if it asks for that and `may_speculate`.

        Args:
            make: builds the engine of a model that has not drafted yet.
        """
        if not spec.may_speculate:
            return
        self._requests[request.id] = request
        self._most_guesses[request.id] = spec.guesses.num_tokens
        if isinstance(spec.guesses, LookupOptions):
            self._lookups[request.id] = PromptLookup(spec.guesses.num_tokens, spec.guesses.max_ngram)
            return
        model = spec.guesses.model
        if model not in self._draft_models:
            self._draft_models[model] = make(model)
        self._drafted_by[request.id] = self._draft_models[model]
        self._drafted_by[request.id].add(request, spec)

    def forget(self, request_id: int) -> None:
        """The request ended."""
        if self._requests.pop(request_id, None) is not None:
            del self._most_guesses[request_id]
            self._lookups.pop(request_id, None)
            drafted_by = self._drafted_by.pop(request_id, None)
            if drafted_by is not None:
                drafted_by.forget(request_id)

    def release(self) -> None:
        """Forget all requests and give up the draft models' blocks."""
        for request_id in list(self._requests):
            self.forget(request_id)
        for draft_model in self._draft_models.values():
            draft_model.release()
        self._draft_models.clear()

    def propose(self, spare: int, batch: int) -> dict[int, list[int]]:
        """Guesses by request id, for requests that have only one token left to compute.

        Args:
            spare: how many tokens the step has room for beside one of every request.
            batch: requests that share a step.
        """
        if not self._requests:
            return {}
        share = spare // len(self._requests)
        limits = {
            request.id: min(room, share, self._most_guesses[request.id])
            for request in self._requests.values()
            # The token that a full acceptance draws on top must fit too.
            if (room := request.max_tokens - len(request.tokens) - 1) > 0 and share > 0 and request.can_draft
        }
        costs = self.step_cost.of_guesses(batch, max(limits.values(), default=0))
        found = {
            request_id: self._lookups[request_id].propose(self._requests[request_id].tokens, limit, costs)
            for request_id, limit in limits.items()
            if request_id in self._lookups
        }
        for draft_model in set(self._drafted_by.values()):
            mine = {one: limit for one, limit in limits.items() if self._drafted_by.get(one) is draft_model}
            found.update(draft_model.propose(mine, costs, self.step_cost.time(batch)))
        return found

    def learn(self, request_id: int, guessed: int, accepted: int) -> None:
        """How many of a request's guesses stood."""
        if request_id in self._lookups:
            self._lookups[request_id].learn(guessed, accepted)
        elif request_id in self._drafted_by:
            self._drafted_by[request_id].learn(request_id, guessed, accepted)
