"""Tokens told one by one add up to the text, with every kind of tokenizer; prompts may end within a character."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from frontend.answer.choice import ChoiceStream, Delta
from frontend.answer.feed import Feed, Submission
from frontend.answer.scores import Speller, chat_scores, text_scores
from frontend.request.generation import StopRules
from frontend.text.detokenizer import Detokenizer, TokenBytes
from headrace.model_files.artefacts import Artefacts
from protocol.frontend import Finish, FinishReason
from protocol.packing import pack_u32
from protocol.requests import Sampling
from tests.frontend.fake_scheduler import records_of
from tests.frontend.text.test_detokenizer import LLAMA2, METASPACE, METASPACE_NEVER, NO_STRIP, TEXTS, sentencepiece

DECODERS = {"llama2": LLAMA2, "no strip": NO_STRIP, "metaspace": METASPACE, "metaspace never": METASPACE_NEVER}
KINDS = {name: TokenBytes.from_tokenizer(sentencepiece(decoder)) for name, decoder in DECODERS.items()}


@pytest.fixture(scope="module")
def smollm2_bytes(smollm2: Artefacts) -> TokenBytes:
    return TokenBytes.from_tokenizer(smollm2.tokenizer())


@pytest.fixture(scope="module")
def plain_bytes(byte_model: Artefacts) -> TokenBytes:
    return TokenBytes.from_tokenizer(byte_model.tokenizer())


def deltas_of(tokens: TokenBytes, ids: list[int], steps: list[int], *, chat: bool) -> list[Delta]:
    feed = Feed(Submission("m", pack_u32([1]), 10_000, Sampling(logprobs=0), b""), 1)
    detokenizer = Detokenizer(tokens, continues_text=not chat)
    choice = ChoiceStream(feed, StopRules(10_000), detokenizer, lambda feed: None, tells_tokens=True)
    made: list[Delta] = []
    at = 0
    for size in [*steps, len(ids)]:
        piece = ids[at : at + size]
        feed.accept(at, pack_u32(piece), records_of(piece, at, 0))
        at += len(piece)
        while (delta := choice.poll()) is not None:
            made.append(delta)
    feed.finish(Finish(1, FinishReason.LENGTH, len(ids)))
    last = choice.poll()
    assert last is not None
    return [*made, last]


def check(tokens: TokenBytes, ids: list[int], steps: list[int], *, chat: bool) -> None:
    deltas = deltas_of(tokens, ids, steps, chat=chat)
    text = "".join(delta.text for delta in deltas)
    plain = Detokenizer(tokens, continues_text=not chat)
    assert text == plain.push(ids) + plain.flush()
    speller = Speller(tokens, skip_special=True, as_ids=False)
    entries = [entry for delta in deltas for entry in chat_scores(speller, delta.scored, delta.records)]
    assert len(entries) == len(ids)
    assert bytes(byte for entry in entries for byte in entry.bytes).decode(errors="replace") == text
    arrays = [text_scores(speller, delta.scored, delta.records) for delta in deltas]
    starts = [start for piece in arrays for start in piece.text_offset]
    names = [name for piece in arrays for name in piece.tokens]
    for start, name, entry in zip(starts, names, entries, strict=True):
        told = bytes(entry.bytes)
        if not name.startswith("bytes:") and told and "\ufffd" not in text[start : start + 1]:
            assert text.startswith(told.decode(), start), (start, name)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@given(ids=st.lists(st.integers(0, 267), max_size=14), steps=st.lists(st.integers(1, 8), max_size=6))
@example(ids=[197, 259], steps=[])
@settings(max_examples=60, deadline=None)
def test_sentencepiece_tokens_add_up(kind: str, chat: bool, ids: list[int], steps: list[int]) -> None:
    check(KINDS[kind], ids, steps, chat=chat)


@given(text=TEXTS, steps=st.lists(st.integers(1, 8), max_size=6), chat=st.booleans())
@settings(max_examples=80, deadline=None)
def test_byte_level_tokens_add_up(
    smollm2: Artefacts, smollm2_bytes: TokenBytes, text: str, steps: list[int], chat: bool
) -> None:
    check(smollm2_bytes, smollm2.tokenizer().encode(text, add_special_tokens=False).ids, steps, chat=chat)


@given(
    before=st.text(max_size=3),
    cut=st.sampled_from("é客👍"),
    after=st.text(max_size=3),
    at=st.integers(1, 3),
    steps=st.lists(st.integers(1, 3), max_size=8),
    echoed=st.booleans(),
)
def test_a_character_begun_in_the_prompt_is_whole(plain_bytes, before, cut, after, at, steps, echoed) -> None:
    at = min(at, len(cut.encode()) - 1)
    prompt, rest = before.encode() + cut.encode()[:at], list(cut.encode()[at:] + after.encode())
    assert Detokenizer.incomplete_end(prompt) == cut.encode()[:at]
    detokenizer = Detokenizer(plain_bytes, continues_text=True, prompt_tail=cut.encode()[:at], echoed=echoed)
    text = ""
    for size in [*steps, len(rest)]:
        text += detokenizer.push(rest[:size])
        rest = rest[size:]
    assert text + detokenizer.flush() == cut + after


@pytest.mark.parametrize(("ids", "alone", "echoed"), [
    (b"", "", "\ufffd"),
    (b"a", "a", "\ufffda"),
    (b"\xf0", "\ufffd", "\ufffd\ufffd"),
    ("é".encode(), "é", "\ufffdé"),
    (b"\x9f", "\ufffd", "\ufffd"),
])  # fmt: skip
def test_a_character_that_is_never_completed_is_the_prompts_fault(plain_bytes, ids, alone, echoed) -> None:
    for steps in (1, 8):
        for shown, expected in ((False, alone), (True, echoed)):
            detokenizer = Detokenizer(plain_bytes, prompt_tail=b"\xf0", echoed=shown)
            text = "".join(detokenizer.push(ids[at : at + steps]) for at in range(0, len(ids), steps))
            assert text + detokenizer.flush() == expected
