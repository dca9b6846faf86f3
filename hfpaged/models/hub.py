"""A model's files from the Hugging Face cache or hub, without the client's long waits."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub

from hfpaged.errors import ModelDownloadError

REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json")
WANTED_FILES = ["*.json", "*.jinja", "*.txt", "model.safetensors"]
REACHABLE_WITHIN_SECONDS = 3.0


def find_cached(repo_id: str) -> Path | None:
    """The cached snapshot of a repository, or None unless every file that loading needs is there."""
    paths = [huggingface_hub.try_to_load_from_cache(repo_id, name) for name in REQUIRED_FILES]
    if not all(isinstance(path, str) for path in paths):
        return None
    return Path(str(paths[0])).parent


def download(repo_id: str) -> Path:
    """Fetch a repository's model and tokenizer files into the Hugging Face cache.

    Raises:
        ModelDownloadError: offline mode is on, the hub does not answer within a few seconds, or it refuses.
    """
    if huggingface_hub.is_offline_mode():
        raise ModelDownloadError("HF_HUB_OFFLINE is set")
    # Any exception means "not from there": the client's transport, and so its exceptions, changes between releases.
    try:
        # The downloader retries for minutes where the hub cannot be reached; one short question first does not.
        huggingface_hub.HfApi().model_info(repo_id, timeout=REACHABLE_WITHIN_SECONDS)
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=WANTED_FILES))
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelDownloadError(f"Hugging Face hub: {reason[0]}") from error
