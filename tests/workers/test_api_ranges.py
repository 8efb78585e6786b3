"""Whatever the API takes, a sound row can be sampled: no parameter of a client makes the engine fail."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.request.requests import CommonFields
from protocol.requests import Sampling
from protocol.worker import RowStatus
from tests.workers.test_sampler import VOCAB, Row, sample

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def declared(hint: Any) -> tuple[type, msgspec.Meta]:
    """A number's type and range, wherever in a field's annotation they stand."""
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta):
            return hint.__origin__, meta
    return next(declared(one) for one in get_args(hint) if one is not type(None))


def edges(name: str) -> st.SearchStrategy[Any]:
    """Numbers of a request field's declared range, its ends and the smallest steps from them above all."""
    kind, meta = declared(get_type_hints(CommonFields, include_extras=True)[name])
    if kind is int:
        return st.sampled_from([0, 1, 2, VOCAB - 1, VOCAB, 2**31 - 1])
    low, high = float(meta.ge), float(meta.le)
    least = np.nextafter(low, high)
    if name == "top_p":  # 0 is the least that goes on the wire, 1e-6
        low = least = 1e-6
    return st.sampled_from([low, least, low + 1e-30, low + 1e-8, (low + high) / 2, high]) | st.floats(low, high)


@given(
    st.fixed_dictionaries({name: edges(name) for name in NAMES}),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.0, 1e-6, 1.0, 30.0, 1e4]),
)
@settings(max_examples=300, deadline=None)
def test_no_parameter_of_the_api_makes_a_sound_row_fail(parameters: dict[str, Any], seed: int, spread: float) -> None:
    logits = (np.random.default_rng(seed % 97).standard_normal(VOCAB) * spread).astype(np.float32)
    tokens = (1, 2, 3, 7, 7, 7, int(logits.argmax()), int(logits.argmin()))
    sampled = sample([Row(logits, Sampling(**parameters), seed=seed, tokens=tokens, prompt_len=3)])
    assert sampled.status.tolist() == [RowStatus.OK], parameters
