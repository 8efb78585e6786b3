"""The drive path: from the bytes of a StepDone to the bytes of the next Plan, in a cell without sockets."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import numpy as np

from bench.simulation.group import SimulatedGroup, registration
from protocol import codec
from protocol.frontend import Submit
from protocol.ids import Epoch, SessionId
from protocol.packing import pack_u32
from protocol.requests import Choice
from protocol.worker import StepDone
from scheduler.cell import Cell
from scheduler.frames import StepFrames
from scheduler.outbox import Outgoing, ToLeader
from scheduler.settings import CellSettings
from workers.simulated import StepTimes

EPOCH = Epoch(1)
LEADER = SessionId(1)
PROMPT_TOKENS = 32
WARM_UP_STEPS = 50


@dataclass(frozen=True)
class DriveResult:
    """Microseconds. The drive path ends with the plan; the turn also makes the frames of all frontends."""

    running: int
    ids_per_row: int
    drive_p50: float
    drive_p99: float
    turn_p50: float
    turn_p99: float

    @property
    def turn_per_request(self) -> float:
        """Everything a step costs, per running request."""
        return self.turn_p50 / self.running


def measure(running: int, *, ids_per_row: int = 1, steps: int = 2000, frontends: int = 4) -> DriveResult:
    """Decode steps with every request running and none finishing."""
    cell, group = _running_cell(running, ids_per_row, steps + WARM_UP_STEPS, frontends)
    drive, turn = np.zeros(steps + WARM_UP_STEPS), np.zeros(steps + WARM_UP_STEPS)
    gc.collect()
    for nth in range(len(drive)):
        group.begin()
        done = codec.encode(group.end())
        began = time.perf_counter()
        message = codec.worker_side_to_scheduler.decode(done)
        assert isinstance(message, StepDone)
        cell.step_done(LEADER, message, 0.0)
        outbox = cell.take_outbox()
        assert isinstance(outbox[0], ToLeader), "the plan leaves first"
        codec.encode(outbox[0].message)
        driven = time.perf_counter()
        for outgoing in outbox[1:]:
            if isinstance(outgoing, StepFrames):
                for _, frame in outgoing.build():
                    codec.encode(frame)
        drive[nth], turn[nth] = driven - began, time.perf_counter() - began
        _plans_to(group, outbox)
    drive_50, drive_99 = np.percentile(drive[WARM_UP_STEPS:] * 1e6, (50, 99))
    turn_50, turn_99 = np.percentile(turn[WARM_UP_STEPS:] * 1e6, (50, 99))
    return DriveResult(running, ids_per_row, float(drive_50), float(drive_99), float(turn_50), float(turn_99))


def _running_cell(running: int, ids_per_row: int, steps: int, frontends: int) -> tuple[Cell, SimulatedGroup]:
    """A cell with one group whose slots are all decoding."""
    length = PROMPT_TOKENS + (steps + 64) * ids_per_row
    shape = registration(
        num_blocks=running * (length // 16 + 2) + 64,
        max_slots=running,
        max_tokens_per_step=running * (PROMPT_TOKENS + 2),
        max_ids_per_row=ids_per_row,
        context=length + 64,
    )
    cell, group = Cell(CellSettings(max_queue_requests=running), EPOCH), SimulatedGroup(shape, StepTimes())
    cell.group_joined(LEADER, shape, 0.0)
    for number in range(frontends):
        cell.frontend_joined(SessionId(100 + number))
    prompt = pack_u32(np.arange(PROMPT_TOKENS))
    for rid in range(running):
        message = Submit((Choice(rid, rid),), "m", prompt, max_tokens=length, stop_ids=pack_u32([2, 3]))
        cell.submit(SessionId(100 + rid % frontends), message, 0.0)
    cell.advance(0.0)
    _plans_to(group, cell.take_outbox())
    while cell.load(0.0).requests_waiting or len(group.plans) < 2:
        group.begin()
        cell.step_done(LEADER, group.end(), 0.0)
        _plans_to(group, cell.take_outbox())
    return cell, group


def _plans_to(group: SimulatedGroup, outbox: list[Outgoing]) -> None:
    for outgoing in outbox:
        if isinstance(outgoing, ToLeader):
            group.receive(outgoing.message)
