"""Made-up logprobs look like a model's, and are the same however a sequence is cut into steps."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.synthetic_logprobs import synthetic_record


@settings(max_examples=300, deadline=None)
@given(
    key=st.integers(0, 2**64 - 1),
    place=st.integers(0, 2**20),
    vocab=st.sampled_from([21, 22, 30, 260, 49152]),
    alternatives=st.integers(0, 20),
    data=st.data(),
)
def test_a_record_is_one_of_a_distribution(key, place, vocab, alternatives, data) -> None:
    token = data.draw(st.integers(0, vocab - 1))
    rank, (own, *top) = synthetic_record(key, place, token, alternatives, vocab)
    assert own[0] == token and len(top) == alternatives
    ids, values = [each for each, _ in top], [value for _, value in top]
    assert len(set(ids)) == len(ids) and all(0 <= each < vocab for each in ids)
    assert sorted(top, key=lambda pair: (-pair[1], pair[0] if math.isinf(pair[1]) else 0)) == top
    assert sum(math.exp(value) for value in values) < 1 and math.exp(own[1]) < 1
    if rank <= alternatives:
        assert top[rank - 1] == own
    else:
        assert token not in ids and (not top or own[1] <= values[-1])
    assert 1 <= rank <= vocab
    assert synthetic_record(key, place, token, 20, vocab)[1][1 : 1 + alternatives] == top, "more only adds to the end"


def test_minus_infinity_comes_now_and_then_for_alternatives_and_for_the_token() -> None:
    records = [synthetic_record(7, place, 5, 5, 260) for place in range(400)]
    assert 50 < sum(any(math.isinf(value) for _, value in pairs) for _, pairs in records) < 150
    own = [math.isinf(pairs[0][1]) for _, pairs in records]
    assert 10 < sum(own) < 60
    assert {rank for rank, _ in records} >= {1, 2, 3}
    assert any(20 < rank <= 40 for rank, pairs in records if not math.isinf(pairs[0][1]))
    for rank, pairs in records:
        if math.isinf(pairs[0][1]):
            finite = [each for each, value in pairs[1:] if not math.isinf(value)]
            assert rank == 1 + len(finite) + sum(each not in finite for each in range(5)), "ties by the lower id"
