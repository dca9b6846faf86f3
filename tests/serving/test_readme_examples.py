"""The examples of README's section on serving, run as they stand but for the address and the model."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
SECTION = README[README.index("\n## Serve\n") : README.index("\n## ", README.index("\n## Serve\n") + 5)]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTION, flags=re.DOTALL)


def test_the_curl_example(server) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = next(text for text in examples("sh") if text.startswith("curl"))
    command = command.replace("http://127.0.0.1:8000", server.url).replace(MODEL, "tiny").replace("curl", "curl -sS", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant", done.stderr


def test_the_openai_example(server) -> None:
    pytest.importorskip("openai")
    code = next(text for text in examples("python") if "OpenAI" in text)
    code = code.replace("http://127.0.0.1:8000", server.url).replace(MODEL, "tiny")
    printed = io.StringIO()
    # It samples without a seed, and the tiny model may begin with the end.
    for _ in range(5):
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue()


def test_the_engine_client_example(model_directory: Path) -> None:
    code = next(text for text in examples("python") if "EngineClient" in text)
    code = code.replace(MODEL, str(model_directory)).replace("[504, 3575, 282]", "[5, 6, 7]")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert len(json.loads(printed.getvalue())) <= 20
