from __future__ import annotations

from pathlib import Path

import pytest

from hfpaged.cli import verify
from hfpaged.cli.main import main
from hfpaged.cli.verify import GreedyText, first_difference


def test_equal_texts_exit_with_zero(model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", str(model_directory), "--max-new-tokens", "8", "hello"]) == 0
    printed = capsys.readouterr().out
    assert "equal, 8 tokens" in printed or "equal," in printed
    assert any(f"tier {tier}" in printed for tier in ("program", "leaves", "modules"))


def test_a_difference_is_shown_with_both_margins(
    model_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = verify.greedy
    calls = []

    def second_call_differs(*arguments):
        text = real(*arguments)
        calls.append(text)
        return text if len(calls) == 1 else GreedyText([*text.tokens[:3], 7, *text.tokens[4:]], text.logits)

    monkeypatch.setattr(verify, "greedy", second_call_differs)
    assert main(["verify", "--model", str(model_directory), "--max-new-tokens", "8", "hello"]) == 1
    printed = capsys.readouterr().out
    assert "equal for 3 tokens" in printed
    assert printed.count("a gap of") == 2


@pytest.mark.parametrize(
    ("stock", "patched", "first"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2, 3], [1, 2], 2), ([], [], None)],
)
def test_first_difference(stock: list[int], patched: list[int], first: int | None) -> None:
    assert first_difference(stock, patched) == first
