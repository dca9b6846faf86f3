"""TokenHistory mirrors a growing list."""

from __future__ import annotations

from hfpaged.sampling.history import TokenHistory


def test_follows_appends_over_every_growth() -> None:
    history, tokens = TokenHistory(), [5]
    for token in range(700):
        assert history.update(tokens).tolist() == tokens
        tokens.append(token)


def test_earlier_views_stay_what_they_were() -> None:
    history, tokens = TokenHistory(), [1, 2, 3]
    view = history.update(tokens)
    tokens.extend(range(1000))
    history.update(tokens)
    history.update([9, 9, 9, 9])
    assert view.tolist() == [1, 2, 3]


def test_another_list_starts_over() -> None:
    history = TokenHistory()
    history.update([1, 2, 3])
    assert history.update([4, 5, 6, 7]).tolist() == [4, 5, 6, 7]
    assert history.update([8]).tolist() == [8]
