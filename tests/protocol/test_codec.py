"""Every message keeps its bytes, and no bytes but a message's do anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import describe, frontend, worker
from protocol.base import Wire
from protocol.codec import Decoder, FrameError, encode
from protocol.versions import negotiate
from tests.protocol.examples import DIRECTIONS, FROM_FRONTEND

GOLDEN = Path(__file__).with_name("golden.json")
ROOT = Path(__file__).parents[2]
EXAMPLES = [
    pytest.param(name, decoder, message, id=f"{name}-{type(message).__name__}")
    for name, (decoder, messages) in DIRECTIONS.items()
    for message in messages
]


@pytest.mark.parametrize(("direction", "decoder", "message"), EXAMPLES)
def test_a_message_comes_back_as_it_was_sent(direction: str, decoder: Decoder[Any], message: Wire) -> None:
    assert decoder.decode(encode(message)) == message


@pytest.mark.parametrize(("direction", "decoder", "message"), EXAMPLES)
def test_a_message_keeps_its_golden_bytes(direction: str, decoder: Decoder[Any], message: Wire) -> None:
    """A change here changes what version N says to version N-1: see docs/decisions.md before updating the file."""
    golden = json.loads(GOLDEN.read_text())
    assert encode(message).hex() == golden[f"{direction}/{type(message).__name__}"]


def test_every_message_has_an_example_with_no_field_left_at_its_default() -> None:
    unions = (
        frontend.FrontendToScheduler,
        frontend.SchedulerToFrontend,
        worker.WorkerSideToScheduler,
        worker.SchedulerToLeader,
        worker.SchedulerToLauncher,
    )
    shown = {type(message) for _, messages in DIRECTIONS.values() for message in messages}
    assert shown == {member for union in unions for member in get_args(union)}
    for _, messages in DIRECTIONS.values():
        for message in messages:
            for field in msgspec.structs.fields(message):
                assert getattr(message, field.name) != field.default or field.default is False, (message, field.name)


def test_tags_within_a_direction_are_distinct_and_structs_agree_on_what_is_positional() -> None:
    for _, messages in DIRECTIONS.values():
        tags = [type(message).__struct_config__.tag for message in messages]
        assert len(tags) == len(set(tags))
        assert all(type(message).__struct_config__.array_like for message in messages)
        assert all(type(message).__struct_config__.frozen for message in messages)


def test_a_newer_peers_extra_fields_are_ignored() -> None:
    raw = msgspec.msgpack.decode(encode(FROM_FRONTEND[0]))
    longer = msgspec.msgpack.encode([*raw, "a field of a later version"])
    assert DIRECTIONS["frontend_to_scheduler"][0].decode(longer) == FROM_FRONTEND[0]


def test_an_older_peers_missing_fields_take_their_defaults() -> None:
    message = worker.StepDone(4, 3, 7, b"\1", b"\0\0\0\0", b"\0")
    raw = msgspec.msgpack.decode(encode(message))
    assert DIRECTIONS["worker_side_to_scheduler"][0].decode(msgspec.msgpack.encode(raw[:7])) == message


@pytest.mark.parametrize("name", DIRECTIONS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_frames_decode_or_raise_frame_error_and_nothing_else(name: str, data: st.DataObject) -> None:
    decoder, messages = DIRECTIONS[name]
    frame = bytearray(encode(data.draw(st.sampled_from(messages))))
    for position in data.draw(st.lists(st.integers(0, len(frame) - 1), max_size=6)):
        frame[position] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(0, len(frame)))] if data.draw(st.booleans()) else frame
    candidate = data.draw(st.sampled_from([bytes(frame), data.draw(st.binary(max_size=64))]))
    try:
        message = decoder.decode(candidate)
    except FrameError:
        return
    assert isinstance(message, tuple(type(example) for example in messages))
    encode(message)


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"\x91" * 200_000, id="deep nesting"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="a list of four billion"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="four gigabytes of bytes"),
        pytest.param(b"\x93\x01\xa2\xff\xfe\xa1a", id="a str that is not UTF-8"),
        pytest.param(b"\x92\x1e\xff", id="a negative progress"),
        pytest.param(b"\xd4\x00\x00", id="an extension type"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="HTTP"),
    ],
)
def test_hostile_frames_raise_frame_error(name: str, frame: bytes) -> None:
    with pytest.raises(FrameError):
        DIRECTIONS[name][0].decode(frame)


@pytest.mark.parametrize("name", DIRECTIONS)
def test_every_truncation_of_every_message_raises_frame_error(name: str) -> None:
    decoder, messages = DIRECTIONS[name]
    for message in messages:
        frame = encode(message)
        for length in range(len(frame)):
            with pytest.raises(FrameError):
                decoder.decode(frame[:length])


def test_versions_meet_at_the_newest_both_speak() -> None:
    assert negotiate(1, 3, our_oldest=2, our_newest=5) == 3
    assert negotiate(2, 9, our_oldest=2, our_newest=5) == 5
    assert negotiate(6, 9, our_oldest=2, our_newest=5) is None
    assert negotiate(0, 1, our_oldest=2, our_newest=5) is None


def test_the_reference_page_is_what_the_structs_say() -> None:
    assert (ROOT / "docs" / "protocol.md").read_text() == describe.generate(), "run python -m protocol.describe"
