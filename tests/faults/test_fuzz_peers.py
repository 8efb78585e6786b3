"""The same at the other end of each socket: what a scheduler never sends does nothing to a leader or a frontend."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from headrace.model_files.artefacts import byte_artefacts
from protocol import codec
from protocol.codec import Decoder, FrameError
from tests.faults.fuzz import frames
from tests.frontend.fake_scheduler import Script
from tests.frontend.harness import CHAT, bench, chat
from tests.workers.hand_driven import HandDrivenScheduler
from tests.workers.test_leader import RunningLeader

COUNTS = [500, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
TEXT = "a running answer, token by token"
BATCH = 200
"""Fewer than a socket's high-water mark, so that none is left out."""


def malformed(decoder: Decoder[object], count: int) -> list[bytes]:
    """Bent frames that are no message of this direction; what decodes is an order of the one who may give it."""
    return list(itertools.islice((frame for frame in frames(count) if not _decodes(decoder, frame)), count))


def _decodes(decoder: Decoder[object], frame: bytes) -> bool:
    try:
        decoder.decode(frame)
    except FrameError:
        return False
    return True


@pytest.mark.parametrize("count", COUNTS)
def test_a_leader_executes_its_plans_between_frames_that_are_none(tmp_path: Path, count: int) -> None:
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path}/w"
    scheduler = HandDrivenScheduler(address)
    running = RunningLeader(scheduler, address)
    group = scheduler.open_group()
    group.add(0, [1])
    assert group.done()[2] == [2]
    junk = malformed(codec.scheduler_to_leader, count)
    for step, at in enumerate(range(0, count, BATCH)):
        for frame in junk[at : at + BATCH]:
            scheduler.transport.send(frame, group.peer)
        # Within the sequence's one block: begin anew in time.
        if step % 8 == 7:
            group.plan(drops=(0,))
            group.done()
            group.add(0, [1])
        else:
            group.plan()
        assert group.done()[1] == [1]
    assert running.leader.link_statistics().frames_dropped == count
    running.leader.stop("over")
    running.join()
    scheduler.close()


@pytest.mark.parametrize("count", COUNTS)
async def test_a_stream_comes_whole_between_frames_that_are_none(tmp_path: Path, count: int) -> None:
    junk = malformed(codec.scheduler_to_frontend, count)
    async with bench(tmp_path, byte_artefacts()) as here:
        here.scheduler.script = lambda submit: Script.text(TEXT, gate=5)
        answer = asyncio.create_task(here.post(CHAT, chat()))
        await here.until(lambda: any(job.position == 5 for job in here.scheduler.jobs.values()), "at the gate")
        for at in range(0, count, BATCH):
            here.scheduler.send_raw(junk[at : at + BATCH])
            sent = min(at + BATCH, count)
            await here.until_here(
                lambda sent=sent: here.frontend.client.statistics().link.frames_dropped == sent,
                "every one of them counted",
            )
        here.scheduler.open_gates()
        assert (await answer).json()["choices"][0]["message"]["content"] == TEXT
        assert here.scheduler.sessions == 1
