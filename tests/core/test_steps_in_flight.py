"""Plans that are committed before the tokens of the step before are known, as on a device that runs behind."""

from __future__ import annotations

from collections import deque

import pytest
from books import Memory, make_books, make_request
from core.test_random_schedules import RandomUser

from hfpaged.core.invariants import check
from hfpaged.core.plan import UNKNOWN_TOKEN, PlannedRequest
from hfpaged.core.request import RequestState
from hfpaged.errors import InvariantError


class Device(Memory):
    """Executes plans whose unknown tokens it knows, because it drew them; the books learn them a step later."""

    def __init__(self, books):
        super().__init__(books)
        self.drawn: dict[int, int] = {}

    def text(self, request_id: int) -> list[int]:
        """The request's tokens with what is in flight."""
        request = self.books.requests[request_id]
        assert request.pending <= 1
        return request.tokens + [self.drawn[request_id] for _ in range(request.pending)]

    def draw(self, plan, steered) -> dict[int, int]:
        """The next token of each request that catches up, steered ones excepted."""
        texts = {request_id: self.text(entry.id) for entry in plan.entries for request_id in entry.samples}
        return {
            request_id: (sum(text) * 7 + len(text) + request_id) % 50
            for request_id, text in texts.items()
            if request_id not in steered
        }

    def execute(self, plan) -> None:
        entries = tuple(self._filled_in(entry) for entry in plan.entries)
        super().execute(plan._replace(entries=entries))

    def _filled_in(self, entry: PlannedRequest) -> PlannedRequest:
        # Only the last token can be one that the step before draws.
        assert UNKNOWN_TOKEN not in entry.tokens[:-1]
        text = self.text(entry.id)[entry.start : entry.start + entry.num_tokens]
        if entry.tokens[-1] != UNKNOWN_TOKEN:
            assert list(entry.tokens) == text
        return entry._replace(tokens=tuple(text))


class UserAhead(RandomUser):
    """A random user of a device that is one step behind."""

    def __init__(self, seed, **books):
        super().__init__(seed, **books)
        self.memory = Device(self.books)
        self.in_flight: deque[dict[int, int]] = deque()
        self.settled_ahead = 0

    def step(self):
        plan = self.books.plan()
        if plan is None:
            return self._settle()
        self.memory.execute(plan)
        if self.random.random() < 0.1:
            self.books.abort(plan)
            check(self.books)
            return True
        drawn = self.memory.draw(plan, self.steered)
        accepted = {entry.id: self.random.randrange(entry.logits_for) for entry in plan.entries if entry.logits_for > 1}
        wanted = [request_id for _, request_id in plan.sampled_rows()]
        self.books.commit(plan, {one: UNKNOWN_TOKEN if one in drawn else None for one in wanted}, accepted)
        check(self.books)
        self.in_flight.append(drawn)
        if len(self.in_flight) > 1:
            self._settle()
        self.memory.drawn = drawn
        return True

    def _settle(self):
        if not self.in_flight:
            return False
        for request_id, token in self.in_flight.popleft().items():
            request = self.books.requests.get(request_id)
            if request is None:
                continue
            self.settled_ahead += request.pending == 2
            self.books.settle(request_id, token)
            # One in eight of the texts ends by its content, which the books could not foresee.
            if len(request.tokens) >= request.max_tokens or token % 8 == 0:
                self.books.finish(request_id)
        check(self.books)
        return True


@pytest.mark.parametrize("preemption", ["auto", "swap", "recompute"])
@pytest.mark.parametrize("num_blocks", [8, 13, 24])
def test_random_schedules_one_step_ahead(num_blocks, preemption):
    user = UserAhead(num_blocks, num_blocks=num_blocks, max_batch_tokens=11, max_requests=4, preemption=preemption)
    for _ in range(2000):
        user.act()
        check(user.books)
        user.step()
    for _ in range(5000):
        if not user.books.requests:
            break
        user._feed()
        user.step()
    assert not user.books.requests
    assert user.books.pool.num_free == num_blocks
    assert user.settled_ahead > 100
    counters = user.books.counters
    assert counters.preemptions_swap + counters.preemptions_recompute > 0


def started(books, **fields):
    """A request whose prompt of five tokens was computed, with its first token on the way."""
    request = make_request(0, range(5), **fields)
    books.add(request)
    books.commit(books.plan(), {0: UNKNOWN_TOKEN})
    return request


def test_a_request_runs_on_with_a_token_that_is_not_known():
    books = make_books()
    request = started(books)
    plan = books.plan()
    (entry,) = plan.entries
    assert (entry.start, entry.num_tokens, entry.tokens, entry.samples) == (5, 1, (UNKNOWN_TOKEN,), (0,))
    books.commit(plan, {0: UNKNOWN_TOKEN})
    books.settle(0, 31)
    assert (request.tokens, request.pending, request.length) == ([0, 1, 2, 3, 4, 31], 1, 7)


def test_a_text_of_known_length_is_not_computed_beyond_its_end():
    books = make_books()
    request = started(books, max_tokens=6)
    assert books.plan() is None
    assert request.state is RequestState.IDLE
    books.settle(0, 31)
    assert request.length == 6
    check(books)


def test_a_block_is_shared_only_when_all_its_tokens_are_known():
    books = make_books(block_size=4)
    books.add(make_request(0, range(7)))
    books.commit(books.plan(), {0: UNKNOWN_TOKEN})
    books.commit(books.plan(), {0: UNKNOWN_TOKEN})  # fills the second block with a token that nobody knows
    assert books.requests[0].published == 1
    books.settle(0, 31)
    assert books.requests[0].published == 2


def test_a_newcomer_with_the_same_known_tokens_does_not_wait_for_other_logits():
    books = make_books()
    started(books)
    child = make_request(1, range(5))
    books.add(child, fork_of=0)
    assert child.state is RequestState.WAITING


def test_rejected_drafts_are_not_counted_as_accepted():
    books = make_books()
    request = make_request(0, range(5))
    books.add(request)
    books.commit(books.plan(), {0: 9})
    books.append_drafts(0, [1, 2, 3])
    books.commit(books.plan(), {0: None})
    books.reject_drafts(0, 2)
    assert request.tokens == [0, 1, 2, 3, 4, 9, 1]
    assert (books.counters.draft_tokens, books.counters.accepted_tokens) == (3, 1)
    assert books.counters.generated_tokens == 2
    check(books)


def test_only_pending_tokens_can_be_settled():
    books = make_books()
    started(books)
    books.settle(0, 1)
    with pytest.raises(InvariantError, match="no token to settle"):
        books.settle(0, 2)
