"""Models by the name that a user gives."""

from __future__ import annotations

import pytest

from hfpaged.errors import InputError
from hfpaged.models.loading import resolve


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "~/model", "models/llama/7b"])
def test_a_path_with_nothing_there_is_no_question_to_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="is no directory"):
        resolve(name)


def test_hub_ids_and_directories_pass(tmp_path):
    assert resolve("gpt2") == ("gpt2", "gpt2")
    assert resolve("owner/name") == ("owner/name", "owner/name")
    assert resolve(str(tmp_path)) == (str(tmp_path), tmp_path.name)
