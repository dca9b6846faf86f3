"""Request: one sequence as the books see it. Token ids, how many of them are computed, and the blocks they are in."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hfpaged.core.prefix_cache import chain_hash


class RequestState(Enum):
    """Where a request is.

    Attributes:
        WAITING: in the queue. Holds blocks only if it was forked and found no free slot.
        PARKED: waits for a block of its prefix that another request is about to compute.
        FORKING: waits for its parent to finish the prompt that they share.
        RUNNING: has tokens to compute and gets its share of every step.
        IDLE: has caught up and waits for a token from outside; may have lost its blocks meanwhile.
        FINISHED: holds nothing.
    """

    WAITING = "waiting"
    PARKED = "parked"
    FORKING = "forking"
    RUNNING = "running"
    IDLE = "idle"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """There is no prefill or decode phase: a request has known tokens, some of them computed, and the rest to catch up.

        tokens   |---------- prompt ----------|-- generated --|
        computed |------------------>|  to compute next ...   |

    One that has caught up waits for its next token, which a sampler or an outside caller appends.

    Attributes:
        id: unique among live requests.
        tokens: known token ids, prompt first. The scheduler appends to it.
        prompt_len: how many of them are the prompt.
        max_tokens: length that it may never exceed.
        priority: lower runs first; `arrival` decides among equals.
        cache_root: root of its chain of block hashes; None keeps it out of the prefix cache.
        computed: tokens whose keys and values are in `blocks`, or in the block store if `swapped`.
        blocks: ids of its blocks, in order of position.
        admitted: whether it has ever run.
        published: how many of its first blocks the prefix cache has seen.
        draft_tokens: how many of the last known tokens are unverified guesses.
        score_from: first of the prompt's tokens whose logits must still be seen, to score the token behind it; None if
            no (more) prompt token is scored.
        pending: tokens behind the known ones that steps in flight draw: they count, but their ids are not known yet.
        state: which queue it is in, if any.
        swapped: whether its keys and values are in the block store.
    """

    id: int
    tokens: list[int]
    prompt_len: int
    max_tokens: int
    priority: int = 0
    arrival: int = 0
    cache_root: bytes | None = None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    admitted: bool = False
    published: int = 0
    draft_tokens: int = 0
    score_from: int | None = None
    pending: int = 0
    state: RequestState = RequestState.WAITING
    swapped: bool = False
    _hashes: list[bytes] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, int]:
        """Key of service: smaller goes first."""
        return (self.priority, self.arrival)

    @property
    def length(self) -> int:
        """Its tokens, those included whose ids are not known yet."""
        return len(self.tokens) + self.pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to compute."""
        return len(self.tokens) + self.pending - self.computed

    @property
    def most_cached(self) -> int:
        """How many of its first tokens may come out of the prefix cache: the logits of all others are needed."""
        unverified = len(self.tokens) - 1 - self.draft_tokens
        return unverified if self.score_from is None else min(unverified, self.score_from)

    @property
    def is_decoding(self) -> bool:
        """Whether all that is left to compute is its next token, and guesses behind it."""
        return self.num_uncomputed <= self.draft_tokens + 1

    @property
    def can_draft(self) -> bool:
        """Whether guesses can be computed in the same step as the one token that is left."""
        return self.state is RequestState.RUNNING and self.num_uncomputed == 1 and self.draft_tokens == 0

    def scored_by(self, start: int, end: int) -> int:
        """How many prompt tokens get their score when tokens [start, end) are computed."""
        if self.score_from is None:
            return 0
        return max(0, min(end, self.prompt_len - 1) - max(start, self.score_from))

    def on_scored(self, end: int) -> None:
        """Of a request whose prompt is scored: all tokens before `end` have been computed with the needed logits."""
        self.score_from = max(end, self.score_from) if end < self.prompt_len - 1 else None

    def copy(self, request_id: int) -> Request:
        """A request that knows the same tokens and holds nothing, for `Scheduler.fork`."""
        return Request(
            request_id,
            list(self.tokens),
            self.prompt_len,
            self.max_tokens,
            self.priority,
            arrival=request_id,
            cache_root=self.cache_root,
            admitted=True,
        )

    def block_hashes(self, block_size: int, count: int) -> list[bytes]:
        """Hashes of the first `count` blocks, each over its tokens and all before. Only new ones are computed.

        The request must have a `cache_root`, and `count * block_size` known tokens.
        """
        while len(self._hashes) < count:
            first = len(self._hashes) * block_size
            parent = self._hashes[-1] if self._hashes else self.cache_root
            self._hashes.append(chain_hash(parent, self.tokens[first : first + block_size]))
        return self._hashes if len(self._hashes) == count else self._hashes[:count]

    def drop_last_tokens(self, count: int, block_size: int) -> None:
        """Forget the last `count` known tokens and the hashes of blocks they were in."""
        if count:
            del self.tokens[-count:]
            self.computed = min(self.computed, len(self.tokens))
            del self._hashes[len(self.tokens) // block_size :]
