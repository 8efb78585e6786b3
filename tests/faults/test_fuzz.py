"""Whatever arrives on a socket: a running stream does not notice, and what arrived is counted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from protocol.codec import FrameError, frontend_to_scheduler, worker_side_to_scheduler
from protocol.frontend import FinishReason
from tests.faults.fuzz import frames
from tests.scheduler.live_loop import WAIT_MS, Bench, Peer
from tests.scheduler.rig import FakeFrontend, expected_output, submit

STRANGERS = 4
STEPS = 8


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, peer_timeout=3600.0)
    yield bench
    bench.close()


def _send(stranger: Peer, frame: bytes) -> None:
    """Without waiting for ever: a stranger may have lost its connection, and what it is told piles up."""
    while stranger.transport.socket.poll(0):
        stranger.transport.receive()
    if stranger.transport.socket.poll(WAIT_MS, zmq.POLLOUT):
        stranger.transport.send(frame)


@pytest.mark.parametrize(
    "count", [1_000, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])], ids=["short", "long"]
)
def test_a_running_stream_does_not_notice_what_strangers_send(bench: Bench, count: int) -> None:
    # Names that no stranger hits upon: a well-formed Register of one's group would rightly take its place.
    survivor_peer, (leader, worker) = bench.frontend(), bench.leader(group="survivor", model="survivor")
    survivor, message = FakeFrontend(bench.hello(survivor_peer, instance=5).session), submit(1, model="survivor")
    survivor.expect(message)
    survivor_peer.send(message)
    strangers = [bench.frontend() for _ in range(STRANGERS)], [bench.worker() for _ in range(STRANGERS)]
    junk = frames(seed=count)
    malformed = [0, 0]
    for step in range(1, STEPS + 1):
        for _ in range(count // STEPS):
            frame = next(junk)
            for door, decoder in enumerate((frontend_to_scheduler, worker_side_to_scheduler)):
                _send(strangers[door][len(frame) % STRANGERS], frame)
                malformed[door] += not _decodes(decoder, frame)
        bench.serve(leader, worker, until=lambda done, step=step: len(worker.executed) >= step)
    while survivor.open:
        survivor.receive(survivor_peer.next())
    assert survivor.output[1] == expected_output(message)
    assert survivor.finishes[1].reason is FinishReason.LENGTH
    _wait_until_counted(bench, malformed)


def _wait_until_counted(bench: Bench, malformed: list[int]) -> None:
    for _ in itertools.repeat(None, 200):
        bench.advance(0.0)
        published = bench.loop.published()
        if published is not None and all(
            door.frames_dropped >= least
            for door, least in zip((published.frontends, published.workers), malformed, strict=True)
        ):
            return
    raise AssertionError(f"{malformed} frames were no messages; counted were {published}")


def _decodes(decoder, frame: bytes) -> bool:
    try:
        decoder.decode(frame)
    except FrameError:
        return False
    return True
