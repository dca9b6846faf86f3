"""Triton's interpreter in the place of a GPU, for every test in this folder; they are skipped where Triton is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from quiet import small_and_quiet
from standin.fake_accelerator import FakeAccelerator
from standin.triton_machine import triton_machine


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    with small_and_quiet():
        yield


@pytest.fixture(autouse=True)
def machine() -> Iterator[FakeAccelerator]:
    pytest.importorskip("triton")
    with triton_machine() as device:
        yield device
