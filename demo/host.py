"""Host: the patched model that every visitor of the demo shares."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hfpaged
from hfpaged.demo.visitors import Visitors
from hfpaged.errors import InputError
from hfpaged.generation.engine import Engine

Message = dict[str, Any]


class ChatPrompt(NamedTuple):
    """A conversation as the model reads it.

    Attributes:
        ids: token ids.
        left_out: messages at the front that did not fit.
        in_thought: whether the template has opened a thought that the model goes on with.
    """

    ids: list[int]
    left_out: int
    in_thought: bool


class Host:
    """A model with its engine, tokenizer and visitors.

    Attributes:
        label: name of the model to show.
        max_users: requests that the engine takes into one step, and so the most events to run at once.
        max_tokens: most tokens that a prompt and its answer may have together.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, label: str, **options: Any):
        """Patch `model` with these options of `EngineConfig`. One that was patched with them before stays as it is."""
        hfpaged.patch(model, **options)
        self.model = model
        self.tokenizer = tokenizer
        self.label = label
        self.visitors = Visitors()
        self.engine: Engine = hfpaged.engine(model)
        self.max_users = self.engine.config.max_requests
        self._warm_up()
        stats = self.engine.stats()
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        in_pool = stats["blocks_total"] * stats["block_size"]
        self.max_tokens = min(in_pool, longest or in_pool)

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        return "tools" in str(self.tokenizer.chat_template or "")

    @property
    def dtype(self) -> str:
        """Name of the weights' dtype."""
        return str(self.model.dtype).removeprefix("torch.")

    def stock_twin(self) -> PreTrainedModel:
        """An unpatched model on the same weights, which may run beside the engine: it shares no module with it."""
        return copy.copy(self.model)

    def chat_prompt(self, messages: Sequence[Message], new_tokens: int, tools: Sequence[dict] = ()) -> ChatPrompt:
        """Tokenize a conversation. Of one that is too long, the oldest messages after the system's are left out.

        Args:
            new_tokens: room to keep for the answer.
            tools: JSON schemas for the chat template.

        Raises:
            InputError: the last question alone, with what came after it, is too long.
        """
        system = [message for message in messages[:1] if message["role"] == "system"]
        turns = list(messages[len(system) :])
        left_out = 0
        while True:
            text = self._as_text(system + turns, tools)
            ids = self.tokenizer(text, add_special_tokens=not self.tokenizer.chat_template)["input_ids"]
            if len(ids) + new_tokens <= self.max_tokens:
                return ChatPrompt(ids, left_out, in_thought=text.rstrip().endswith("<think>"))
            # Templates insist that a conversation begins with a user's message.
            keep = next((at for at in range(1, len(turns)) if turns[at]["role"] == "user"), None)
            if keep is None:
                raise InputError(
                    f"the message is {len(ids):,} tokens long and its answer up to {new_tokens:,}; "
                    f"together they may be {self.max_tokens:,} at most"
                )
            left_out += keep
            turns = turns[keep:]

    def _as_text(self, messages: list[Message], tools: Sequence[dict]) -> str:
        if not self.tokenizer.chat_template:
            return "\n".join([*(message["content"] for message in messages), ""])
        return self.tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, add_generation_prompt=True, tokenize=False
        )

    def _warm_up(self) -> None:
        """Pay the one-time costs (step program, memory) before the first visitor would."""
        self.engine.submit([0], max_new_tokens=1, do_sample=False).result()
