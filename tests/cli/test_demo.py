"""`hfpaged demo`: what goes wrong before a page is served."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from hfpaged.cli import main


def test_without_gradio_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_directory: Path
) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main.main(["demo", "--model", str(model_directory)]) == 2
    assert capsys.readouterr().err == "hfpaged: error: the demo needs gradio; install hfpaged[demo]\n"


def test_a_taken_port_is_said_in_one_line(capsys: pytest.CaptureFixture[str], model_directory: Path) -> None:
    pytest.importorskip("gradio", reason="needs the extra hfpaged[demo]")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main.main(["demo", "--model", str(model_directory), "--port", port, "--blocks", "40"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"hfpaged: error: cannot serve on 127.0.0.1, {port}")
