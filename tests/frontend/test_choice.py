"""What a choice says depends on its ids alone: not on how they were cut, and not on who ended it first."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from frontend.answer.choice import ChoiceStream, Delta
from frontend.answer.feed import Cancelled, Feed, Submission
from frontend.answer.shapes import Ending
from frontend.errors import ApiError
from frontend.request.generation import StopRules
from frontend.text.detokenizer import Detokenizer, TokenBytes
from headrace.model_files.byte_tokenizer import byte_tokenizer
from protocol.frontend import Finish, FinishReason
from protocol.packing import pack_u32
from protocol.requests import Sampling
from tests.frontend.fake_scheduler import records_of

EOS = 258
TOKENS = TokenBytes.from_tokenizer(Tokenizer.from_str(json.dumps(byte_tokenizer())))
LETTERS = list(b"ab.") + list("é".encode()) + list("👍".encode())

sequences = st.lists(st.sampled_from([*LETTERS, 255, 257, EOS]), min_size=1, max_size=24)
stop_lists = st.lists(st.sampled_from(["a", "ab", "ba.", "b.a", "é", "👍", "bé"]), max_size=3, unique=True)


def new_feed(logprobs: int = -1) -> Feed:
    return Feed(Submission("m", pack_u32([1]), 100, Sampling(logprobs=logprobs), b""), 1)


def decoded(ids: list[int]) -> str:
    """Text of ids so far, with an unfinished character left out."""
    return Detokenizer(TOKENS).push(ids)


def expected(ids: list[int], rules: StopRules) -> tuple[str, Ending | None]:
    """The rule itself, at its plainest: the least k at which anything holds."""
    for k in range(1, len(ids) + 1):
        token, before = ids[k - 1], ids[: k - 1]
        if token in rules.ids and k > rules.min_tokens:
            named = token in rules.client_ids
            shown = full_text(before, TOKENS.of(token) if named and rules.show_stop else b"")
            return shown, Ending("stop", token if named else None, k)
        matched = None
        if k >= rules.min_tokens:
            matched = first_match(decoded(before), decoded(ids[:k]), rules.strings)
        if matched is not None:
            text, stop = matched
            return text + (stop if rules.show_stop else ""), Ending("stop", stop, k)
        if k == rules.max_tokens:
            return full_text(ids[:k]), Ending("length", None, k)
    return full_text(ids), None


def full_text(ids: list[int], more: bytes = b"") -> str:
    return (bytes(index for index in ids if index < 256) + more).decode(errors="replace")


def first_match(before: str, text: str, stops: tuple[str, ...]) -> tuple[str, str] | None:
    """The stop string complete first within the text that is new, the longest of those that end there."""
    for end in range(len(before) + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return None


def run(
    ids: list[int], cuts: list[int], rules: StopRules, end: Any, *, tells_tokens: bool = False
) -> tuple[list[Delta], Feed]:
    """Feed ids in pieces, the end with the last one, and read now and then; returns the deltas."""
    feed = new_feed(logprobs=0 if tells_tokens else -1)
    deltas: list[Delta] = []
    choice = ChoiceStream(
        feed, rules, Detokenizer(TOKENS), lambda feed: feed.finish(Cancelled()), tells_tokens=tells_tokens
    )
    at = 0
    for cut in [*(min(cut, len(ids)) for cut in cuts), len(ids)]:
        piece = ids[at : max(at, cut)]
        feed.accept(at, pack_u32(piece), records_of(piece, at, 0) if tells_tokens else b"")
        at = max(at, cut)
        if at == len(ids):
            feed.finish(end)
        feed.notify()
        if cut % 3 and not _is_over(deltas):
            deltas += read(choice)
    return deltas + ([] if _is_over(deltas) else read(choice)), feed


def _is_over(deltas: list[Delta]) -> bool:
    return bool(deltas) and deltas[-1].ending is not None


def read(choice: ChoiceStream) -> list[Delta]:
    """What there is now."""
    deltas: list[Delta] = []
    while (delta := choice.poll()) is not None:
        deltas.append(delta)
        if delta.ending is not None:
            break
    return deltas


@example([97, 97, 97, 98, 257], ["a"], {257}, 5, 4, False, True, [])
@given(
    sequences,
    stop_lists,
    st.sets(st.sampled_from([ord("b"), ord("."), 257]), max_size=2),
    st.integers(1, 24),
    st.integers(0, 6),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 24), max_size=8),
)
def test_the_answer_is_that_of_the_plain_rule_for_every_cut(
    ids, stops, client, limit, least, ignore, show_stop, cuts
) -> None:
    rules = StopRules(
        max_tokens=limit,
        min_tokens=min(least, limit),
        strings=tuple(stops),
        client_ids=frozenset(client),
        end_ids=frozenset() if ignore else frozenset({EOS}),
        show_stop=show_stop,
    )
    text, ending = expected(ids, rules)
    ending = ending or Ending("length", None, len(ids))
    for tells_tokens in (False, True):
        end = Finish(1, FinishReason.LENGTH, len(ids))
        deltas, feed = run(ids, sorted(cuts), rules, end, tells_tokens=tells_tokens)
        assert "".join(delta.text for delta in deltas) == text
        assert deltas[-1].ending == ending
        assert all(delta.text for delta in deltas[:-1]), "a delta without text that does not end the choice"
        assert feed.end is not None
        if tells_tokens:
            check_tokens(ids, ending, text, deltas, rules)


def check_tokens(ids: list[int], ending: Ending, text: str, deltas: list[Delta], rules: StopRules) -> None:
    """Every counted token is told once, in order, and those with a logprob are exactly those of the text."""
    count = ending.completion_tokens
    assert [token for delta in deltas for token in delta.ids] == ids[:count]
    scored = [(one.token, one.start) for delta in deltas for one in delta.scored]
    assert [token for token, _ in scored] == ids[: len(scored)]
    stopped_by = ids[len(scored) - 1] if len(scored) == count and ending.stop_reason == ids[count - 1] else None
    plain = bytes(token for token, _ in scored[: len(scored) - (stopped_by is not None)] if token < 256)
    last = b"" if stopped_by is None else TOKENS.of(stopped_by)
    assert (plain + last).decode(errors="replace") == text
    starts = [start for _, start in scored]
    assert starts == sorted(starts) and all(0 <= start <= len(text) for start in starts)
    for delta in deltas:
        assert delta.records is not None
        records = delta.records.tolist()
        assert len(records) == len(delta.scored)
    told = [record for delta in deltas for record in delta.records["pairs"]["id"][:, 0].tolist()]
    assert told == ids[: len(scored)]


def test_an_error_comes_after_the_text_before_it() -> None:
    feed = new_feed()
    choice = ChoiceStream(feed, StopRules(100), Detokenizer(TOKENS), lambda feed: None)
    feed.accept(0, pack_u32(b"ab"))
    feed.finish(Finish(1, FinishReason.ERROR, 2, message="broken"))
    delta = choice.poll()
    assert delta is not None and delta.text == "ab"
    with pytest.raises(ApiError) as caught:
        choice.poll()
    error = caught.value
    assert (error.status, error.message, error.headers["x-should-retry"]) == (500, "broken", "false")


def test_a_deadline_is_an_end_once_the_answer_has_a_token_and_an_error_before() -> None:
    def expired(ids: bytes, has_tokens: bool) -> list[Delta]:
        feed = new_feed()
        choice = ChoiceStream(feed, StopRules(100), Detokenizer(TOKENS), lambda feed: None)
        feed.accept(0, pack_u32(ids))
        feed.finish(Finish(1, FinishReason.DEADLINE, len(ids)))
        assert choice.expired
        choice.expire(has_tokens=has_tokens)
        return read(choice)

    assert expired(b"ab", True)[-1].ending == Ending("length", "timeout", 2)
    assert expired(b"", True)[-1].ending == Ending("length", "timeout", 0)
    with pytest.raises(ApiError) as caught:
        expired(b"", False)
    assert (caught.value.status, caught.value.code) == (504, "timeout")


def test_a_deadline_after_an_ending_changes_nothing() -> None:
    feed = new_feed()
    choice = ChoiceStream(feed, StopRules(2), Detokenizer(TOKENS), lambda feed: None)
    feed.accept(0, pack_u32(b"ab"))
    choice.expire(has_tokens=True)
    assert read(choice)[-1].ending == Ending("length", None, 2)


def test_missing_logprobs_are_the_engines_error() -> None:
    feed = new_feed(logprobs=1)
    choice = ChoiceStream(feed, StopRules(2), Detokenizer(TOKENS), lambda feed: None, tells_tokens=True)
    feed.accept(0, pack_u32(b"ab"), records_of(list(b"a"), 0, 1))
    with pytest.raises(ApiError) as caught:
        read(choice)
    assert caught.value.code == "engine_error"


def test_a_stop_string_is_found_on_arrival_whether_or_not_anybody_reads() -> None:
    cancelled: list[Feed] = []
    feed = new_feed()

    choice = ChoiceStream(feed, StopRules(100, strings=("b",)), Detokenizer(TOKENS), cancelled.append)
    feed.accept(0, pack_u32(b"abc"))
    feed.notify()
    assert cancelled == [feed]
    assert read(choice)[-1].ending == Ending("stop", "b", 2)
