from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from frontend.text.detokenizer import Detokenizer, TokenBytes
from headrace.model_files.artefacts import ArtefactError, Artefacts

TEXTS = st.text(st.characters(codec="utf-8"), max_size=40) | st.sampled_from(
    ["Hello wörld 👋🏽 日本語", " leading", "  two", "a\n\n  b\t", "👩‍👩‍👧‍👦", "", " ", "İstanbul ﬁ"]
)


def _in_pieces(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> str:
    text = ""
    at = 0
    for cut in [*cuts, len(ids)]:
        text += detokenizer.push(ids[at : at + cut])
        at = min(len(ids), at + cut)
    return text + detokenizer.push(ids[at:]) + detokenizer.flush()


@pytest.fixture(scope="module")
def smollm2_bytes(smollm2: Artefacts) -> TokenBytes:
    return TokenBytes.from_tokenizer(smollm2.tokenizer())


def sentencepiece(decoder: dict[str, Any] | None) -> Tokenizer:
    """Characters, their words with a leading space, and a token for every byte."""
    specials = ["<unk>", "<s>", "</s>"]
    pieces = [
        *specials,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "▁a",
        "▁▁",
        "h",
        "é",
        "the",
        "<0x",
        "日",
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    added = [
        {"id": vocab[piece], "content": piece, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for piece in specials
    ]
    model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>", "byte_fallback": True}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": added, "decoder": decoder, "model": model}))


LLAMA2 = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
NO_STRIP = {"type": "Sequence", "decoders": LLAMA2["decoders"][:-1]}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
METASPACE_NEVER = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True}


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 5), max_size=12), skip=st.booleans(), extra=st.integers(0, 16))
def test_any_split_of_an_encoded_text_gives_the_text(
    smollm2: Artefacts, smollm2_bytes: TokenBytes, text: str, cuts: list[int], skip: bool, extra: int
) -> None:
    tokenizer = smollm2.tokenizer()
    ids = [*tokenizer.encode(text, add_special_tokens=False).ids, extra]
    made = _in_pieces(Detokenizer(smollm2_bytes, skip_special_tokens=skip), ids, cuts)
    assert made == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=20), cuts=st.lists(st.integers(0, 4), max_size=10))
def test_any_split_of_any_ids_decodes_like_the_library(
    smollm2: Artefacts, smollm2_bytes: TokenBytes, ids: list[int], cuts: list[int]
) -> None:
    assert _in_pieces(Detokenizer(smollm2_bytes), ids, cuts) == smollm2.tokenizer().decode(ids)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=24) | st.text(max_size=12).map(str.encode), cuts=st.lists(st.integers(0, 4), max_size=9))
def test_broken_bytes_become_what_python_makes_of_them(byte_model: Artefacts, data: bytes, cuts: list[int]) -> None:
    tokens = TokenBytes.from_tokenizer(byte_model.tokenizer())
    assert _in_pieces(Detokenizer(tokens), list(data), cuts) == data.decode("utf-8", "replace")


@given(text=st.text(min_size=1, max_size=12))
def test_no_replacement_character_appears_on_the_way(byte_model: Artefacts, text: str) -> None:
    detokenizer = Detokenizer(TokenBytes.from_tokenizer(byte_model.tokenizer()))
    pieces = [detokenizer.push([byte]) for byte in text.encode()]
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(
    "decoder", [LLAMA2, NO_STRIP, METASPACE, METASPACE_NEVER], ids=["llama2", "no-strip", "m", "m-n"]
)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_sentencepiece_decoders(decoder: dict[str, Any], data: st.DataObject) -> None:
    tokenizer = sentencepiece(decoder)
    byte_text = [[3 + byte for byte in "é日👋".encode()], [3 + 0x20], [3 + 0x0A]] if "decoders" in decoder else []
    piece = st.sampled_from([*([index] for index in [0, 1, 2, *range(259, 268)]), *byte_text])
    ids = [index for chunk in data.draw(st.lists(piece, max_size=8)) for index in chunk]
    cuts = data.draw(st.lists(st.integers(0, 3), max_size=8))
    skip = data.draw(st.booleans())
    made = _in_pieces(Detokenizer(TokenBytes.from_tokenizer(tokenizer), skip_special_tokens=skip), ids, cuts)
    assert made == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_continuation_keeps_its_leading_space() -> None:
    tokenizer = sentencepiece(LLAMA2)
    tokens = TokenBytes.from_tokenizer(tokenizer)
    the = tokenizer.token_to_id("▁the")
    assert Detokenizer(tokens).push([the]) == "the"
    assert Detokenizer(tokens, continues_text=True).push([the]) == " the"


def test_ids_outside_the_vocabulary_are_ignored(smollm2_bytes: TokenBytes) -> None:
    assert Detokenizer(smollm2_bytes).push([60_000, 504, 2**31]) == Detokenizer(smollm2_bytes).push([504])
    assert smollm2_bytes.of(60_000) == b""


def test_exact_bytes_of_split_characters_rejoin(smollm2: Artefacts, smollm2_bytes: TokenBytes) -> None:
    ids = smollm2.tokenizer().encode("日本 👋🏽", add_special_tokens=False).ids
    assert b"".join(map(smollm2_bytes.of, ids)).decode() == "日本 👋🏽"


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_unsupported_decoders_are_named(decoder: dict[str, Any] | None) -> None:
    with pytest.raises(ArtefactError, match=r"WordPiece|none"):
        TokenBytes.from_tokenizer(sentencepiece(decoder))
