from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from hfpaged.cli import env, main
from hfpaged.errors import ConfigError, MissingDependencyError
from hfpaged.native import library


@pytest.mark.parametrize("command", [command.NAME for command in main.COMMANDS])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: hfpaged {command}" in capsys.readouterr().out


def test_an_error_of_the_users_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise ConfigError("block_size must be positive")

    monkeypatch.setattr(env, "run", fail)
    assert main.main(["env"]) == 2
    assert capsys.readouterr().err == "hfpaged: error: block_size must be positive\n"


def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(env, "run", interrupt)
    assert main.main(["env"]) == 130


def test_a_model_that_does_not_exist_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["support", "no-such/model"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hfpaged: error: cannot load 'no-such/model': ")
    assert error.count("\n") == 1


def test_support_says_that_a_model_can_be_patched(model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["support", str(model_directory)]) == 0
    assert "(LlamaForCausalLM) can be patched" in capsys.readouterr().out


def test_support_says_on_which_tier_a_model_runs_and_why_not_on_a_faster_one(
    tmp_path: Path, tiny_model: Callable[..., PreTrainedModel], capsys: pytest.CaptureFixture[str]
) -> None:
    if library.unavailable():
        pytest.skip(library.unavailable())
    tiny_model("opt").save_pretrained(tmp_path)
    assert main.main(["support", str(tmp_path)]) == 0
    _, tier, reason, *refusals = capsys.readouterr().out.splitlines()
    assert tier == "tier leaves, attention native"
    assert reason.startswith("no faster tier: ") and "in an unknown way" in reason
    assert [refusal.split(":")[0] for refusal in refusals] == ["  - 4 modules run as they are"]


def test_support_gives_the_reasons_against_a_model_and_exit_code_1(
    tmp_path: Path, tiny_model: Callable[..., PreTrainedModel], capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("mamba").save_pretrained(tmp_path)
    assert main.main(["support", str(tmp_path)]) == 1
    heading, reason, *_ = capsys.readouterr().out.splitlines()
    assert heading.endswith("(MambaForCausalLM) cannot be patched:")
    assert reason.startswith("  - ")


def test_env_shows_versions_and_whether_the_kernels_are_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "unavailable", lambda: "not built: do this")
    assert main.main(["env"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["kernels"] == "off: not built: do this"
    assert rows["transformers"][0].isdigit()
    assert set(rows) >= {"python", "torch", "cpu", "threads", "memory", "gpu", "flashinfer"}


def test_env_names_the_instruction_set_of_working_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unavailable", lambda: None)
    monkeypatch.setattr(library, "isa", lambda: "avx2")
    assert env.kernels() == "on, avx2"


def test_a_package_that_an_engine_process_lacks_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("hfpaged.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(MissingDependencyError, match=r"msgspec: pip install 'hfpaged\[serve\]'"):
        importlib.import_module("hfpaged.serving.process.client")
