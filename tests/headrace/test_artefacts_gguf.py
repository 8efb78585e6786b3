from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model_files.artefacts import ArtefactError, Artefacts, default_model, load_artefacts
from headrace.model_files.gguf_metadata import read_metadata
from headrace.model_files.gguf_tokenizer import byte_alphabet

STRINGS = [
    "The capital of France is Paris.",
    " leading",
    "trailing ",
    "a  b   c\t\td\n\n\ne \r\n f",
    "def f(x):\n    return x[0]  # comment\n\n\n\tif x:\n",
    "1234567 3.14 1,000 x1y22 v2.0",
    "it's I'LL they've don't 'S",
    "naïve façade Ñandú Größe İstanbul ﬁ",
    "こんにちは世界。 안녕하세요 مرحبا Здравствуй",
    "👋🏽 👩‍👩‍👧‍👦 🇫🇷 e\u0301 \u200b \u00a0x \u3000y",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>x",
    "<|im_start|><|im_end|>",
    'https://example.com/a?b=c&d=e#f {"k": [1, 2]} <b>&amp;</b>',
    "",
    " ",
    "\n",
    "...!!!???---___===",
]
SPACES_BEFORE_DIGITS = ["\n\n1. one\n\n2. two", "x =  1", "    4 spaces", "a\n  10"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def smollm2(cache: Path) -> Artefacts:
    return load_artefacts(default_model(), cache=cache)


def test_the_default_model_is_read_from_its_file(smollm2: Artefacts) -> None:
    assert smollm2.name == "SmolLM2-135M-Instruct"
    assert smollm2.weights == Path(default_model())
    assert (smollm2.vocab_size, smollm2.context, smollm2.end_ids) == (49152, 8192, (2,))
    wanted = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    }
    assert wanted.items() <= smollm2.config.items()
    assert smollm2.special.names["bos_token"] == "<|im_start|>"
    assert smollm2.special.names["eos_token"] == "<|im_end|>"
    assert not smollm2.special.add_bos
    assert "<|im_start|>assistant" in smollm2.chat_templates["default"]
    assert len(smollm2.special.literals) == 17


def test_a_second_load_reads_the_cache(smollm2: Artefacts, cache: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("headrace.model_files.gguf_metadata.read_metadata", lambda path: pytest.fail("parsed again"))
    monkeypatch.setattr("headrace.model_files.artefacts._load_tokenizer", lambda path: pytest.fail("tokenizer loaded"))
    again = load_artefacts(default_model(), cache=cache)
    assert again.digest == smollm2.digest
    assert again.directory == smollm2.directory


def test_the_cached_folder_is_a_model_directory_of_its_own(smollm2: Artefacts, cache: Path) -> None:
    again = load_artefacts(str(smollm2.directory), cache=cache)
    assert (again.config, again.special, again.end_ids) == (smollm2.config, smollm2.special, smollm2.end_ids)
    assert {path.name for path in smollm2.directory.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert smollm2.directory.stat().st_mode & 0o077 == 0


def test_a_folder_with_one_gguf_file_is_that_file(smollm2: Artefacts, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "model.Q4_1.gguf").symlink_to(default_model())
    artefacts = load_artefacts(str(tmp_path), cache=cache)
    assert artefacts.name == "model"
    assert artefacts.directory == smollm2.directory


@pytest.mark.slow
def test_ids_equal_transformers_reading_of_the_same_file(smollm2: Artefacts, tmp_path: Path) -> None:
    """Except for whitespace before a digit, where transformers leaves out the split that the file names."""
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import PreTrainedTokenizerFast  # what AutoTokenizer ends in, without a slow look at the config

    file = Path(default_model())
    oracle = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    ours = smollm2.tokenizer()
    for text in STRINGS:
        ids = oracle.encode(text)
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == oracle.backend_tokenizer.decode(
            ids, skip_special_tokens=False
        )
    assert oracle.get_vocab() == ours.get_vocab()
    split = Tokenizer.from_str(oracle.backend_tokenizer.to_str())
    split.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*STRINGS, *SPACES_BEFORE_DIGITS]:
        assert ours.encode(text).ids == split.encode(text).ids, text


# --- made files -----------------------------------------------------------------------------------------------------


class GgufFile:
    """Writes a small but whole GGUF file. Numbers are u32, floats f32, lists of them i32 and f32."""

    def __init__(self, **fields: Any) -> None:
        self.fields: dict[str, Any] = {
            "general.architecture": "llama",
            "llama.context_length": 128,
            "llama.embedding_length": 8,
            "llama.block_count": 1,
            "llama.feed_forward_length": 16,
            "llama.attention.head_count": 2,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
        }
        self.fields.update({key.replace("__", "."): value for key, value in fields.items()})

    def write(self, path: Path, tensors: tuple[str, ...] = ("token_embd.weight",)) -> Path:
        tokens = self.fields.get("tokenizer.ggml.tokens")
        rows = len(tokens) if isinstance(tokens, list) and tokens else 4
        body = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(self.fields))
        for key, value in self.fields.items():
            body += self._text(key) + self._value(value)
        for name in tensors:
            body += self._text(name) + struct.pack("<IQQIQ", 2, 8, rows, 0, 0)
        path.write_bytes(body + bytes(-len(body) % 32) + bytes(rows * 8 * 4))
        return path

    def _text(self, text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    def _value(self, value: Any) -> bytes:
        if isinstance(value, bool):
            return struct.pack("<I?", 7, value)
        if isinstance(value, int):
            return struct.pack("<II", 4, value)
        if isinstance(value, float):
            return struct.pack("<If", 6, value)
        if isinstance(value, str):
            return struct.pack("<I", 8) + self._text(value)
        head = struct.pack("<I", 9)
        if value and isinstance(value[0], str):
            return head + struct.pack("<IQ", 8, len(value)) + b"".join(map(self._text, value))
        code, kind = ("f", 6) if value and isinstance(value[0], float) else ("i", 5)
        return head + struct.pack("<IQ", kind, len(value)) + struct.pack(f"<{len(value)}{code}", *value)


SPM_WORDS = ["▁", "t", "h", "e", "▁t", "he", "▁the", "a", "▁a", "n", "d", "an", "and", "▁and", "x", "1", "2", "▁▁"]
SPM_WORDS += ["é", "in", "i", "g", "ing", "."]
SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_WORDS],
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(SPM_WORDS))],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(SPM_WORDS)],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
LETTERS = list(byte_alphabet().values())
BPE = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": [*LETTERS, "Ġa", "aa", "<|end|>", "<think>", "<｜fin｜>"],
    "tokenizer.ggml.token_type": [*[1] * 258, 3, 4, 3],
    "tokenizer.ggml.merges": ["Ġ a"],
    "tokenizer.ggml.eos_token_id": 258,
    "tokenizer.ggml.eot_token_id": 260,
}


def _spm(**fields: Any) -> GgufFile:
    return GgufFile(**SPM, **fields)


def _bpe(**fields: Any) -> GgufFile:
    return GgufFile(**{**BPE, **{key.replace("__", "."): value for key, value in fields.items()}})


@pytest.mark.slow
@pytest.mark.parametrize("prefix_space", [True, None])
def test_sentencepiece_ids_equal_transformers_reading(tmp_path: Path, prefix_space: bool | None) -> None:
    from transformers import AutoTokenizer

    extra = {} if prefix_space is None else {"tokenizer.ggml.add_space_prefix": prefix_space}
    path = GgufFile(**SPM, **extra, **{"llama.attention.head_count_kv": 2}).write(tmp_path / "m.gguf")
    artefacts = load_artefacts(str(path), cache=tmp_path / "cache")
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in ["the and", " the", "  the thing", "é日x</s>the", "the\nand 12.", "", "<unk>", "<s>the"]:
        assert artefacts.tokenizer().encode(text).ids == oracle.encode(text), text
        bare = artefacts.tokenizer().encode(text, add_special_tokens=False).ids
        assert bare == oracle.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            expected = oracle.backend_tokenizer.decode(bare, skip_special_tokens=skip)
            assert artefacts.tokenizer().decode(bare, skip_special_tokens=skip) == expected
    assert artefacts.special.add_bos


def test_sentencepiece_without_a_prefix_space(tmp_path: Path) -> None:
    path = _spm(tokenizer__ggml__add_space_prefix=False).write(tmp_path / "m.gguf")
    tokenizer = load_artefacts(str(path), cache=tmp_path).tokenizer()
    ids = tokenizer.encode("the the", add_special_tokens=False).tokens
    assert ids == ["t", "he", "▁the"]
    assert tokenizer.decode(tokenizer.encode(" the").ids) == " the"


def test_byte_level_vocabularies_keep_their_special_and_user_tokens(tmp_path: Path) -> None:
    artefacts = load_artefacts(str(_bpe().write(tmp_path / "m.gguf")), cache=tmp_path)
    encode = artefacts.tokenizer().encode
    assert encode("x a<|end|><think><｜fin｜>").ids == [LETTERS.index("x"), 256, 258, 259, 260]
    assert artefacts.special.literals == {"<|end|>": 258, "<｜fin｜>": 260}
    assert artefacts.end_ids == (258, 260)
    assert artefacts.tokenizer().get_vocab_size() == 261


def test_begin_and_end_tokens_are_added_where_the_file_says_so(tmp_path: Path) -> None:
    path = _bpe(
        tokenizer__ggml__bos_token_id=260, tokenizer__ggml__add_bos_token=True, tokenizer__ggml__add_eos_token=True
    ).write(tmp_path / "m.gguf")
    artefacts = load_artefacts(str(path), cache=tmp_path)
    assert (artefacts.special.add_bos, artefacts.special.add_eos) == (True, True)
    assert artefacts.tokenizer().encode("x").ids == [260, LETTERS.index("x"), 258]


def test_named_templates_and_sampling_defaults_come_along(tmp_path: Path) -> None:
    fields = {
        "tokenizer.chat_template": "a",
        "tokenizer.chat_templates": ["tool_use", "../evil"],
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.chat_template.../evil": "c",
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 20,
    }
    artefacts = load_artefacts(str(_bpe(**fields).write(tmp_path / "m.gguf")), cache=tmp_path)
    assert artefacts.chat_templates == {"default": "a", "tool_use": "b", "___evil": "c"}
    assert artefacts.generation_config == {"eos_token_id": [258, 260], "temperature": 0.7, "top_k": 20}


def test_rope_scaling_and_untied_outputs_are_seen(tmp_path: Path) -> None:
    fields = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
        "llama.rope.freq_base": 500000.0,
        "llama.attention.head_count_kv": [2, 2],
    }
    path = _bpe(**fields).write(
        tmp_path / "m.gguf", tensors=("token_embd.weight", "output.weight", "blk.0.attn_q.bias")
    )
    config = load_artefacts(str(path), cache=tmp_path).config
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert config["rope_scaling"] == wanted
    assert (config["tie_word_embeddings"], config["attention_bias"]) == (False, True)
    assert (config["rope_theta"], config["num_key_value_heads"]) == (500000.0, 2)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer type 't5'"),
        ({"tokenizer.ggml.pre": "brand-new"}, "pre-tokenizer 'brand-new'"),
        ({"tokenizer.ggml.tokens": []}, "array of strings|vocabulary is empty"),
        ({"tokenizer.ggml.tokens": 5}, "should be an array of strings; it is of type int"),
        ({"tokenizer.ggml.merges": ["Ġa"]}, "does not join two tokens"),
        ({"tokenizer.ggml.merges": ["Ġ b"]}, "does not join two tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "one entry per token"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "should be an integer"),
        ({"general.architecture": 5}, "general.architecture should be a string"),
        ({"llama.context_length": "long"}, "should be an integer"),
        ({"llama.rope.freq_base": "x"}, "should be a number"),
        ({"llama.attention.head_count_kv": [1, 2]}, "differs between layers"),
        ({"llama.rope.scaling.type": 1}, "should be a string"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    path = _bpe(**fields).write(tmp_path / "bad.gguf")
    with pytest.raises(ArtefactError, match=says) as caught:
        load_artefacts(str(path), cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert "bad.gguf" in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.json"))


@pytest.mark.parametrize(
    "content", [b"", b"GG", b"GGUF", b"GGUF" + bytes(20), b"PK\x03\x04" * 9, b"GGUF\x01" + bytes(40)]
)
def test_what_is_no_gguf_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ArtefactError, match=r"m\.gguf"):
        load_artefacts(str(tmp_path / "m.gguf"), cache=tmp_path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_headers_are_errors_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    path = _bpe().write(folder / "m.gguf")
    body = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] = data.draw(st.integers(0, 255))
    path.write_bytes(body[: data.draw(st.integers(0, len(body)))])
    try:
        load_artefacts(str(path), cache=folder / "cache")
    except ArtefactError as error:
        assert "\n" not in str(error)
    shutil.rmtree(folder / "cache", ignore_errors=True)


def test_the_header_equals_what_the_gguf_package_reads(tmp_path: Path) -> None:
    from gguf import GGUFReader

    path = _spm(**{"llama.rope.freq_base": 5.5, "general.languages": ["en", "fr"]}).write(tmp_path / "m.gguf")
    ours = read_metadata(path)
    theirs = GGUFReader(path)
    assert ours.fields == {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert [entry.name for entry in ours.tensors] == [tensor.name for tensor in theirs.tensors]
    assert [entry.shape for entry in ours.tensors] == [
        tuple(int(size) for size in np.flip(tensor.shape)) for tensor in theirs.tensors
    ]
