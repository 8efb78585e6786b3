"""What a choice says depends on its ids alone: not on how they were cut, and not on who ended it first."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from frontend.choice import ChoiceStream
from frontend.errors import ApiError
from frontend.feed import Cancelled, Feed, Submission
from frontend.generation import StopRules
from frontend.shapes import Ending
from frontend.text.detokenizer import Detokenizer, TokenBytes
from headrace.byte_tokenizer import byte_tokenizer
from protocol.frontend import Finish, FinishReason
from protocol.packing import pack_u32
from protocol.requests import Sampling

EOS = 258
TOKENS = TokenBytes.from_tokenizer(Tokenizer.from_str(json.dumps(byte_tokenizer())))
LETTERS = list(b"ab.") + list("é".encode()) + list("👍".encode())

sequences = st.lists(st.sampled_from([*LETTERS, 255, 257, EOS]), min_size=1, max_size=24)
stop_lists = st.lists(st.sampled_from(["a", "ab", "ba.", "b.a", "é", "👍", "bé"]), max_size=3, unique=True)


def new_feed() -> Feed:
    return Feed(Submission("m", pack_u32([1]), 100, Sampling(), b""), 1)


def decoded(ids: list[int]) -> str:
    """Text of ids so far, with an unfinished character left out."""
    return Detokenizer(TOKENS).push(ids)


def expected(ids: list[int], rules: StopRules) -> tuple[str, Ending | None]:
    """The rule itself, at its plainest: the least k at which anything holds."""
    for k in range(1, len(ids) + 1):
        token, before = ids[k - 1], ids[: k - 1]
        if token in rules.ids and k > rules.min_tokens:
            reason = token if token in rules.client_ids else None
            return full_text(before), Ending("stop", reason, k)
        matched = first_match(decoded(before), decoded(ids[:k]), rules.strings) if k >= rules.min_tokens else None
        if matched is not None:
            return matched[0], Ending("stop", matched[1], k)
        if k == rules.max_tokens:
            return full_text(ids[:k]), Ending("length", None, k)
    return full_text(ids), None


def full_text(ids: list[int]) -> str:
    return bytes(index for index in ids if index < 256).decode(errors="replace")


def first_match(before: str, text: str, stops: tuple[str, ...]) -> tuple[str, str] | None:
    """The stop string complete first within the text that is new, the longest of those that end there."""
    for end in range(len(before) + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return None


def run(ids: list[int], cuts: list[int], rules: StopRules, end: Any) -> tuple[list[str], Ending, Feed]:
    """Feed ids in pieces, the end with the last one; returns the deltas."""

    async def read() -> tuple[list[str], Ending, Feed]:
        feed = new_feed()
        deltas: list[str] = []
        with ChoiceStream(feed, rules, Detokenizer(TOKENS), lambda feed: feed.finish(Cancelled())) as choice:
            reading = asyncio.create_task(collect(choice, deltas))
            at = 0
            for cut in [*(min(cut, len(ids)) for cut in cuts), len(ids)]:
                feed.accept(at, pack_u32(ids[at : max(at, cut)]))
                at = max(at, cut)
                if at == len(ids):
                    feed.finish(end)
                feed.notify()
                for _ in range(cut % 3):
                    await asyncio.sleep(0)
            return deltas, await reading, feed

    return asyncio.run(read())


async def collect(choice: ChoiceStream, deltas: list[str]) -> Ending:
    await choice.first()
    while True:
        delta = await choice.next()
        deltas.append(delta.text)
        if delta.ending is not None:
            return delta.ending


@given(
    sequences,
    stop_lists,
    st.sets(st.sampled_from([ord("b"), ord("."), 257]), max_size=2),
    st.integers(1, 24),
    st.integers(0, 6),
    st.booleans(),
    st.lists(st.integers(0, 24), max_size=8),
)
def test_the_answer_is_that_of_the_plain_rule_for_every_cut(ids, stops, client, limit, least, ignore, cuts) -> None:
    rules = StopRules(
        max_tokens=limit,
        min_tokens=min(least, limit),
        strings=tuple(stops),
        client_ids=frozenset(client),
        end_ids=frozenset() if ignore else frozenset({EOS}),
    )
    text, ending = expected(ids, rules)
    end = Finish(1, FinishReason.LENGTH, len(ids))
    deltas, given_ending, feed = run(ids, sorted(cuts), rules, end)
    assert "".join(deltas) == text
    assert given_ending == (ending or Ending("length", None, len(ids)))
    assert all(deltas[:-1]), "a delta without text that does not end the choice"
    assert feed.end is not None


def test_an_error_comes_after_the_text_before_it() -> None:
    async def read() -> None:
        feed = new_feed()
        choice = ChoiceStream(feed, StopRules(100), Detokenizer(TOKENS), lambda feed: None)
        feed.accept(0, pack_u32(b"ab"))
        feed.finish(Finish(1, FinishReason.ERROR, 2, message="broken"))
        await choice.first()
        assert (await choice.next()).text == "ab"
        with pytest.raises(ApiError) as caught:
            await choice.next()
        error = caught.value
        assert (error.status, error.message, error.headers["x-should-retry"]) == (500, "broken", "false")

    asyncio.run(read())


def test_a_deadline_is_an_end_once_there_is_a_token_and_an_error_before() -> None:
    async def read(ids: bytes) -> Ending:
        feed = new_feed()
        choice = ChoiceStream(feed, StopRules(100), Detokenizer(TOKENS), lambda feed: None)
        feed.accept(0, pack_u32(ids))
        feed.finish(Finish(1, FinishReason.DEADLINE, len(ids)))
        return await collect(choice, [])

    assert asyncio.run(read(b"ab")) == Ending("length", "timeout", 2)
    with pytest.raises(ApiError) as caught:
        asyncio.run(read(b""))
    assert (caught.value.status, caught.value.code) == (504, "timeout")


def test_a_stop_string_is_found_on_arrival_whether_or_not_anybody_reads() -> None:
    cancelled: list[Feed] = []
    feed = new_feed()

    choice = ChoiceStream(feed, StopRules(100, strings=("b",)), Detokenizer(TOKENS), cancelled.append)
    feed.accept(0, pack_u32(b"abc"))
    feed.notify()
    assert cancelled == [feed]
    assert asyncio.run(choice.next()).ending == Ending("stop", "b", 2)
