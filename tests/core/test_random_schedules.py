"""Thousands of random steps on tiny pools, with every invariant checked and every read verified after each."""

import random

import pytest
from books import Memory, make_books, make_request, sample_of

from hfpaged.core.invariants import check
from hfpaged.core.prefix_cache import root_key
from hfpaged.core.request import RequestState

PREFIXES = [[random.Random(seed).randrange(50) for _ in range(30)] for seed in range(3)]


class RandomUser:
    """Adds, forks, feeds, rolls back and cancels at random."""

    def __init__(self, seed, **books):
        self.random = random.Random(seed)
        self.books = make_books(**books)
        self.memory = Memory(self.books)
        self.steered: set[int] = set()
        self.next_id = 0
        self.epoch = 0

    def add(self, fork_of=None):
        if fork_of is None:
            prefix = self.random.choice(PREFIXES)[: self.random.randrange(1, 20)]
            prompt = prefix + [self.random.randrange(50) for _ in range(self.random.randrange(4))]
        else:
            prompt = self.books.requests[fork_of].tokens[: self.books.requests[fork_of].prompt_len]
        root = root_key(self.epoch) if self.random.random() < 0.8 else None
        request = make_request(
            self.next_id,
            prompt,
            max_tokens=min(len(prompt) + self.random.randrange(1, 10), self.books.pool.num_blocks * 4),
            priority=self.random.randrange(2),
            cache_root=root,
        )
        if self.random.random() < 0.3:
            self.steered.add(self.next_id)
        self.books.add(request, fork_of=fork_of)
        self.next_id += 1

    def act(self):
        action = self.random.random()
        live = list(self.books.requests)
        if action < 0.35 and len(live) < 12:
            self.add(fork_of=self.random.choice(live) if live and self.random.random() < 0.4 else None)
        elif action < 0.40 and live:
            self.books.finish(self.random.choice(live))
        elif action < 0.60:
            self._feed()
        elif action < 0.62:
            self.epoch += 1
            self.books.reset_prefix_cache()

    def _feed(self):
        for request in list(self.books.requests.values()):
            if request.state is not RequestState.IDLE or request.pending:
                continue
            if self.random.random() < 0.2 and len(request.tokens) > request.prompt_len:
                self.books.rollback(request.id, self.random.randrange(1, len(request.tokens) - request.prompt_len + 1))
            room = request.max_tokens - len(request.tokens)
            if room == 0:
                self.books.finish(request.id)
                continue
            if self.random.random() < 0.2:
                child = make_request(self.next_id, request.tokens, max_tokens=request.max_tokens)
                self.steered.add(self.next_id)
                self.books.fork(request.id, child)
                self.next_id += 1
            count = self.random.randrange(1, min(room, 4) + 1)
            tokens = [self.random.randrange(50) for _ in range(count)]
            self.books.append_tokens(request.id, tokens, logits_for=self.random.randrange(1, count + 1))

    def step(self):
        plan = self.books.plan()
        if plan is None:
            return False
        self.memory.execute(plan)
        if self.random.random() < 0.1:
            self.books.abort(plan)
            check(self.books)
            return True
        sampled = sample_of(self.books, plan, self.steered)
        accepted = {entry.id: self.random.randrange(entry.logits_for) for entry in plan.entries if entry.logits_for > 1}
        self.books.commit(plan, sampled, accepted)
        for request_id in sampled:
            request = self.books.requests[request_id]
            if len(request.tokens) >= request.max_tokens:
                self.books.finish(request_id)
        return True


@pytest.mark.parametrize("preemption", ["auto", "swap", "recompute"])
@pytest.mark.parametrize("num_blocks", [8, 13, 24])
def test_random_schedules_keep_every_invariant(num_blocks, preemption):
    user = RandomUser(num_blocks, num_blocks=num_blocks, max_batch_tokens=11, max_requests=4, preemption=preemption)
    for _ in range(2500):
        user.act()
        check(user.books)
        user.step()
        check(user.books)
    for _ in range(5000):
        if not user.books.requests:
            break
        user._feed()
        user.step()
        check(user.books)
    assert not user.books.requests
    assert user.books.pool.num_free == num_blocks
    assert user.next_id > 200
