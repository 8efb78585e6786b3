"""From the flags of ``headrace serve`` to the settings of its processes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.command_line.flags import UsageError
from headrace.model_files.artefact_error import ArtefactError
from headrace.model_files.artefacts import Artefacts, byte_artefacts, default_model, load_artefacts
from headrace.model_files.cache import DEFAULT_LIMIT, cache_directory, keep_within

PATH_KEYS = ("engine_script", "step_log", "api_key_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
ALL_ADDRESSES = "0.0.0.0"


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor itself needs to know; the rest of the flags goes to the children as given."""

    model: str
    """A directory, a GGUF file or a hub name; a path is absolute. Empty with the byte tokenizer."""
    host: str = "127.0.0.1"
    port: int = 8000
    frontends: int = 1
    launcher: Literal["ray", "local"] = "ray"
    groups: int = 1
    ray_address: str = ""
    """Empty: a private head is started."""
    drain_timeout: float = 30.0
    given: dict[str, Any] = {}
    """Every flag that was given, by key."""

    @property
    def asks_for_keys(self) -> bool:
        return bool(self.given.get("api_key") or self.given.get("api_key_file"))

    @property
    def scheme(self) -> str:
        return "https" if self.given.get("ssl_certfile") else "http"

    @property
    def private_ray(self) -> bool:
        return self.launcher == "ray" and not self.ray_address


def serve_settings(given: Mapping[str, Any], environment: Mapping[str, str]) -> ServeSettings:
    """Check what can be checked before anything starts. Raises UsageError, and ArtefactError without a model."""
    values = with_model(given)
    check_engine(values)
    check_installed(values)
    own = {key: values[key] for key in ServeSettings.__struct_fields__ if key in values and key != "groups"}
    launcher = values.get("launcher", "ray")
    ray_address = values.get("ray_address") or environment.get("RAY_ADDRESS", "")
    return ServeSettings(
        **{**own, "ray_address": ray_address if launcher == "ray" else ""},
        groups=parse_groups(values.get("groups", "1")),
        given=values,
    )


def with_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """Normalised flags with MODEL filled in. Raises ArtefactError when there is no default model either."""
    values = normalise(given)
    needed = values.get("tokenizer") != "byte"
    return {**values, "model": values.get("model") or (default_model() if needed else "")}


def normalise(given: Mapping[str, Any]) -> dict[str, Any]:
    """Flags in canonical form: absolute paths, llama.cpp's spellings in ours."""
    values = dict(given)
    layers = values.pop("gpu_layers", None)
    if layers == 0:
        values.setdefault("device", "cpu")
    for key in PATH_KEYS:
        if key in values:
            values[key] = str(Path(values[key]).expanduser().absolute())
    if values.get("api_key") or values.get("api_key_file"):
        values.setdefault("host", ALL_ADDRESSES)
    if model := values.get("model"):
        values["model"] = absolute_if_path(model)
    if template := values.get("chat_template"):
        values["chat_template"] = absolute_if_path(template)
    return values


def check_engine(values: Mapping[str, Any]) -> None:
    """Refuse flags of one engine for another. Raises UsageError."""
    if values.get("tokenizer") == "byte" and values.get("engine", "model") == "model":
        raise UsageError(
            "--tokenizer byte needs --engine scripted or --engine simulated: a model has its own tokenizer"
        )
    if values.get("engine", "model") != "scripted" and values.get("engine_script"):
        raise UsageError("--engine-script needs --engine scripted")


def absolute_if_path(text: str) -> str:
    """Children and ranks have other working directories: what exists here is named absolutely."""
    try:
        path = Path(text).expanduser()
        return str(path.absolute()) if path.exists() else text
    except OSError:  # a template is no file name
        return text


def parse_groups(text: str) -> int:
    """``N`` or ``MIN:MAX``; groups are not elastic yet, so both must be the same."""
    least, _, most = text.partition(":")
    try:
        low, high = int(least), int(most or least)
    except ValueError:
        raise UsageError(f"--groups {text}: write N or MIN:MAX") from None
    if low != high:
        raise UsageError(f"--groups {text}: elastic groups are not built yet; give one number")
    if low < 1:
        raise UsageError(f"--groups {text}: at least 1")
    return low


def check_installed(values: Mapping[str, Any]) -> None:
    """Name the extra that is missing, before any process fails on it."""
    if values.get("launcher", "ray") == "ray" and importlib.util.find_spec("ray") is None:
        raise UsageError("Ray is not installed: pip install 'headrace[ray]', or give --launcher local")
    if values.get("engine", "model") == "model" and not (importlib.util.find_spec("torch") or _has_compiler()):
        raise UsageError("neither torch nor a C++ compiler is installed: pip install 'headrace[worker]'")


def _has_compiler() -> bool:
    """What the native CPU library is built with; it runs models without torch."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++"))


def artefacts_of(given: Mapping[str, Any]) -> Artefacts:
    """Everything of the model but its weights. Raises ArtefactError."""
    if given.get("tokenizer") == "byte":
        return byte_artefacts()
    return load_artefacts(
        given["model"],
        revision=given.get("revision", ""),
        download_dir=given.get("download_dir", ""),
        weights=False,
    )


def trim_cache(given: Mapping[str, Any]) -> None:
    """Keep what former models left in the cache within its limit. An unusable cache is for those who need it."""
    with contextlib.suppress(OSError, ArtefactError):
        keep_within(cache_directory(), given.get("cache_limit", DEFAULT_LIMIT))


def served_names(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Names the API answers to; reads the model's artefacts, also to see that they are there. Raises ArtefactError."""
    artefacts = artefacts_of(given)
    return given.get("served_model_name") or (artefacts.name,)
