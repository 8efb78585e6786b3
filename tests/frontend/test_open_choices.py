"""The table of open choices: rows and records go to their choices, whoever else is in the frame."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.answer.feed import Cancelled, Feed, PromptScores, Submission
from frontend.session.open_choices import ContradictoryFrame, OpenChoices
from protocol.frontend import Finish, FinishReason, Frame, PromptLogprobs
from protocol.logprobs import record_size
from protocol.packing import pack_u8, pack_u32, pack_u64
from protocol.requests import Sampling
from tests.frontend.fake_scheduler import records_of


def feed_with(logprobs: int, scores: PromptScores | None = None) -> Feed:
    return Feed(Submission("m", pack_u32([1]), 100, Sampling(logprobs=logprobs), b""), 1, scores)


def frame_of(rows: list[tuple[Feed, int, int, list[int]]], finishes: tuple[Finish, ...] = ()) -> Frame:
    """Rows of (choice, its id, index of the first, ids)."""
    return Frame(
        "g",
        1,
        rids=pack_u64([rid for _, rid, _, _ in rows]),
        first=pack_u32([first for _, _, first, _ in rows]),
        counts=pack_u8([len(ids) for *_, ids in rows]),
        ids=pack_u32([token for *_, ids in rows for token in ids]),
        logprobs=b"".join(records_of(ids, first, feed.submission.sampling.logprobs) for feed, _, first, ids in rows),
        finishes=finishes,
    )


@given(
    st.lists(st.sampled_from([-1, 0, 2]), min_size=2, max_size=6),
    st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=5),
    st.sets(st.integers(0, 5)),
    st.integers(0, 4),
)
def test_records_stay_with_their_ids_when_choices_of_the_frame_are_gone(kinds, steps, gone, when) -> None:
    table = OpenChoices()
    feeds = [feed_with(kind) for kind in kinds]
    rids = [table.enter(feed) for feed in feeds]
    sent = [0] * len(feeds)
    for number, counts in enumerate(steps):
        if number == when:
            for at in gone:
                if at < len(feeds):
                    table.end(feeds[at], Cancelled())
        rows = []
        for at, (feed, rid) in enumerate(zip(feeds, rids, strict=True)):
            rows.append((feed, rid, sent[at], [at * 10 + number] * counts[at]))
            sent[at] += counts[at]
        assert not table.apply(frame_of(rows)).gaps
    for at, feed in enumerate(feeds):
        if at in gone:
            continue
        assert len(feed.ids) == sent[at]
        expected = b"".join(records_of([token], index, kinds[at]) for index, token in enumerate(feed.ids))
        assert bytes(feed.records) == expected


def test_a_choice_that_is_gone_is_remembered_until_its_end() -> None:
    table = OpenChoices()
    feed, other = feed_with(1), feed_with(-1)
    rid, rid_of_other = table.enter(feed), table.enter(other)
    table.end(feed, Cancelled())
    table.apply(frame_of([(feed, rid, 0, [5]), (other, rid_of_other, 0, [6])]))
    assert other.ids.tolist() == [6]
    table.apply(Frame("", 0, finishes=(Finish(rid, FinishReason.ABORT, 1),)))
    with pytest.raises(ContradictoryFrame):
        table.apply(frame_of([(feed, rid, 1, [5])]))


def test_overlap_is_dropped_with_its_records() -> None:
    feed = feed_with(1)
    assert feed.accept(0, pack_u32([1, 2]), records_of([1, 2], 0, 1))
    assert feed.accept(1, pack_u32([2, 3]), records_of([2, 3], 1, 1))
    assert not feed.accept(5, pack_u32([9]), records_of([9], 5, 1))
    assert feed.ids.tolist() == [1, 2, 3] and bytes(feed.records) == records_of([1, 2, 3], 0, 1)


def test_a_missing_or_extra_record_is_a_contradiction() -> None:
    table = OpenChoices()
    rid = table.enter(feed_with(1))
    for data in (b"", b"x" * (record_size(1) - 1), b"x" * (2 * record_size(1))):
        frame = Frame("g", 1, pack_u64([rid]), pack_u32([0]), pack_u8([1]), pack_u32([5]), logprobs=data)
        with pytest.raises(ContradictoryFrame):
            table.apply(frame)


@given(st.lists(st.integers(1, 9), max_size=6), st.lists(st.integers(1, 9), max_size=6))
def test_a_prompts_scores_are_whole_whoever_delivers_them(cuts, other_cuts) -> None:
    ids = list(range(40, 50))
    scores = PromptScores(len(ids), 1)
    table = OpenChoices()
    rids = [table.enter(feed_with(-1, scores)) for _ in range(2)]
    for rid, where in zip(rids, (cuts, other_cuts), strict=True):
        start = 1
        for end in [*sorted(where), len(ids)]:
            records = records_of(ids[start:end], start, 1)
            assert table.apply(Frame("g", 1, prompt_logprobs=(PromptLogprobs(rid, start, records),))).touched
            start = end
        assert scores.complete
    assert scores.records().tobytes() == records_of(ids[1:], 1, 1)
    with pytest.raises(ContradictoryFrame):
        table.apply(Frame("g", 1, prompt_logprobs=(PromptLogprobs(rids[0], 9, records_of([1, 2], 9, 1)),)))
