from hfpaged.speculation.draft_length import RETRY_AFTER, DraftLength

MOST = 12


def costs(of_one: float) -> list[float]:
    """Of steps in which every guess costs as much of a step."""
    return [1 + of_one * guesses for guesses in range(MOST + 1)]


CHEAP = costs(0.1)


def learned(guessed: int, accepted: int, steps: int = 20) -> DraftLength:
    length = DraftLength(MOST)
    for _ in range(steps):
        length.learn(guessed, accepted)
    return length


def test_the_better_the_guesses_the_further_ahead_they_go():
    lengths = [learned(5, accepted).next(CHEAP) for accepted in (1, 2, 4, 5)]
    assert lengths == sorted(lengths)
    assert lengths[0] < 5
    assert lengths[-1] == 12


def test_the_more_a_guess_costs_the_surer_it_must_be():
    lengths = [learned(5, 4).next(costs(of_one)) for of_one in (0.01, 0.1, 0.3, 0.7, 0.9)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 5
    assert lengths[-1] == 0


def test_a_first_guess_may_cost_more_than_further_ones():
    """As where a step with guesses computes the whole head."""
    jump = [1.0, *(3.5 + 0.02 * guesses for guesses in range(MOST))]
    assert learned(5, 5).next(jump) == MOST
    assert learned(5, 2).next(jump) == 0


def test_a_wrong_guess_counts_once_however_many_follow_it():
    assert learned(2, 1).next(CHEAP) == learned(12, 1).next(CHEAP)


def test_wrong_guesses_stop_the_guessing_but_for_a_try_now_and_then():
    """Ever more seldom, unless one of the tries succeeds."""
    length = learned(4, 0)
    lengths = [length.next(CHEAP) for _ in range(8 * RETRY_AFTER)]
    assert [step + 1 for step, tried in enumerate(lengths) if tried] == [RETRY_AFTER, 3 * RETRY_AFTER, 7 * RETRY_AFTER]
    assert max(lengths) == 1
    length.learn(1, 1)
    assert sum(length.next(costs(0.9)) for _ in range(RETRY_AFTER)) == 1
    assert sum(learned(4, 0).next(CHEAP, may_retry=False) for _ in range(8 * RETRY_AFTER)) == 0


def test_it_recovers():
    length = learned(4, 0)
    for _ in range(20):
        length.learn(1, 1)
    assert length.next(CHEAP) > 4
