from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from frontend.text.detokenizer import Detokenizer, TokenBytes
from frontend.text.stops import StopMatcher, StopStrings
from headrace.model_files.artefacts import Artefacts

letters = st.text(st.sampled_from("abc"), max_size=4)
stop_lists = st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5), min_size=1, max_size=4)


def naive(pieces: list[str], stops: list[str], include_stop: bool) -> tuple[str, str | None, int]:
    """Look for stop strings in the whole text of every number of pieces."""
    for count in range(1, len(pieces) + 1):
        text = "".join(pieces[:count])
        found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            end, _, stop = min(found)
            return text[: end if include_stop else end - len(stop)], stop, count
    return "".join(pieces), None, len(pieces)


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None, int, list[str]]:
    shown = []
    for count, piece in enumerate(pieces, 1):
        shown.append(matcher.push(piece))
        if matcher.matched is not None:
            return "".join(shown), matcher.matched, count, shown
    shown.append(matcher.flush())
    return "".join(shown), None, len(pieces), shown


@settings(max_examples=600)
@given(pieces=st.lists(letters, max_size=12), stops=stop_lists, include_stop=st.booleans())
@example(pieces=["aab"], stops=["ab"], include_stop=False)
@example(pieces=["a", "b", "abc"], stops=["abab", "abc", "b"], include_stop=False)
@example(pieces=["xstopy"], stops=["stop"], include_stop=False)
@example(pieces=["ab", "", "c"], stops=["abcd"], include_stop=False)
@example(pieces=["abcd"], stops=["abcd", "bc"], include_stop=False)
def test_text_stop_and_count_equal_a_naive_search(pieces: list[str], stops: list[str], include_stop: bool) -> None:
    text, stop, count, _ = run(StopMatcher(stops, include_stop=include_stop), pieces)
    assert (text, stop, count) == naive(pieces, stops, include_stop)


@given(pieces=st.lists(letters, max_size=12), stops=stop_lists)
def test_nothing_shown_ever_has_to_be_taken_back(pieces: list[str], stops: list[str]) -> None:
    text, _, _, shown = run(StopMatcher(stops), pieces)
    so_far = ""
    for piece in shown:
        so_far += piece
        assert text.startswith(so_far)


@given(pieces=st.lists(letters, max_size=12), stops=stop_lists)
def test_only_what_may_begin_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = whole = ""
    for piece in pieces:
        shown += matcher.push(piece)
        whole += piece
        if matcher.matched is not None:
            return
        held = whole[len(shown) :]
        assert any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(whole[at:]) for stop in stops for at in range(len(shown)))


def test_text_after_a_match_is_dropped() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("a END b") == "a "
    assert matcher.matched == "END"
    assert matcher.push("c") == ""
    assert matcher.flush("d") == ""


def test_a_stop_string_at_the_very_start_leaves_nothing() -> None:
    assert run(StopMatcher(["a"]), ["a", "b"])[:3] == ("", "a", 1)


def test_choices_share_one_automaton() -> None:
    stops = StopStrings(["ab"])
    first, second = StopMatcher(stops), StopMatcher(stops)
    assert first.push("a") == ""
    assert second.push("b") == "b"
    assert first.push("c") == "ac"


def test_text_that_comes_with_the_end_is_matched_too() -> None:
    matcher = StopMatcher(["a\ufffd"])
    assert matcher.push("xa") == "x"
    assert matcher.flush("\ufffd") == ""
    assert matcher.matched == "a\ufffd"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


@pytest.fixture(scope="module")
def smollm2_bytes(smollm2: Artefacts) -> TokenBytes:
    return TokenBytes.from_tokenizer(smollm2.tokenizer())


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_count_is_the_least_whose_decoded_text_has_a_stop_string(
    smollm2: Artefacts, smollm2_bytes: TokenBytes, data: st.DataObject
) -> None:
    tokenizer = smollm2.tokenizer()
    text = data.draw(
        st.sampled_from(["The end. 日本 👋🏽 is\n\nhere\n\n1. one", "aaa  aaab  é é\n#\n##\n", "stop stopping"])
    )
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    spans = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6)).map(lambda span: text[span[0] : sum(span)])
    stops = data.draw(st.lists(spans | st.sampled_from(["zzz", "end.!"]), min_size=1, max_size=3))
    expected = len(ids) + 1
    for count in range(1, len(ids) + 1):
        decoded = tokenizer.decode(ids[:count]).rstrip("\ufffd")
        if any(stop in decoded for stop in stops):
            expected = count
            break
    detokenizer, matcher = Detokenizer(smollm2_bytes), StopMatcher(stops)
    shown = ""
    got = len(ids) + 1
    for count, index in enumerate(ids, 1):
        shown += matcher.push(detokenizer.push((index,)))
        if matcher.matched is not None:
            got = count
            break
    assert got == expected
    if got > len(ids):
        assert shown + matcher.flush(detokenizer.flush()) == text
