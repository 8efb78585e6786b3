"""Fetches a model by its hub name, when `huggingface_hub` is installed."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.model_files.artefact_error import ArtefactError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

_TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_WEIGHT_FILES = ["*.safetensors"]


def is_hub_name(model: str) -> bool:
    """Whether `model` has the form OWNER/NAME."""
    return _NAME.fullmatch(model) is not None


def fetch(name: str, *, revision: str, download_dir: str, weights: bool) -> Path:
    """The local snapshot of a hub repository; without `weights` only its small files are fetched."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ArtefactError(
            f"{name} is neither a directory nor a GGUF file here; to fetch it by name, pip install huggingface_hub"
        ) from error
    patterns = _TEXT_FILES + (_WEIGHT_FILES if weights else [])
    try:
        return Path(
            snapshot_download(name, revision=revision or None, cache_dir=download_dir or None, allow_patterns=patterns)
        )
    except LocalEntryNotFoundError as error:
        raise ArtefactError(
            f"{name} is neither a directory nor a GGUF file here, and the model hub cannot be reached"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ArtefactError(f"{name} cannot be fetched from the model hub: {reason}") from error
