"""Reads the small files of a Hugging Face model directory: configs, chat templates, special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.model_files.artefact_error import ArtefactError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"
PROCESSOR_TEMPLATE = "chat_template.json"

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """The object in a JSON file; `{}` when the file is not there and not required."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if required:
            raise ArtefactError(f"{path.parent} has no {path.name}") from error
        return {}
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ArtefactError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ArtefactError(f"{path}: should hold a JSON object; it holds a {type(document).__name__}")
    return document


def read_text(path: Path) -> str | None:
    """A text file's contents, or None when it is not there."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ArtefactError(f"{path}: not UTF-8 text: {error}") from error


def read_chat_templates(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Templates by name; the files of their own win over tokenizer_config.json, as transformers has it."""
    templates = _templates_in(tokenizer_config.get("chat_template"), directory / TOKENIZER_CONFIG)
    processor = read_json(directory / PROCESSOR_TEMPLATE).get("chat_template")
    templates |= _templates_in(processor, directory / PROCESSOR_TEMPLATE)
    named = directory / NAMED_TEMPLATES
    if named.is_dir():
        for path in sorted(named.glob("*.jinja")):
            templates[path.stem] = read_text(path) or ""
    default = read_text(directory / CHAT_TEMPLATE)
    if default is not None:
        templates["default"] = default
    return templates


def read_special_names(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` … → text, for those the model has."""
    older = read_json(directory / SPECIAL_TOKENS_MAP)
    names = {}
    for name in SPECIAL_NAMES:
        text = _token_text(tokenizer_config.get(name)) or _token_text(older.get(name))
        if text is not None:
            names[name] = text
    return names


def token_ids(value: Any) -> tuple[int, ...]:
    """An `eos_token_id` field: an integer, a list of them, or absent."""
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if isinstance(item, int) and not isinstance(item, bool))


def _templates_in(value: Any, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        value = [{"name": name, "template": text} for name, text in value.items()]
    try:
        templates = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError) as error:
        raise ArtefactError(f"{path}: chat_template should be text or a list of name and template") from error
    if not all(isinstance(name, str) and isinstance(text, str) for name, text in templates.items()):
        raise ArtefactError(f"{path}: chat_template should be text or a list of name and template")
    return templates


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
