"""What the scheduler spends between a StepDone and the next Plan: decode steps of one group, no sockets.

    python bench/scheduler_step.py [--running 64 256] [--ids 1] [--steps 2000]

Prints, per number of running requests: time from StepDone bytes to the next Plan's bytes (the drive path), and the
whole turn with the frames of all frontends.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np

from protocol import codec
from protocol.frontend import Submit
from protocol.ids import Epoch, SessionId
from protocol.packing import pack_u8, pack_u32
from protocol.requests import Choice
from protocol.worker import Plan, Register, StepDone
from scheduler.cell import Cell
from scheduler.frames import StepFrames
from scheduler.outbox import ToLeader
from scheduler.settings import CellSettings

EPOCH = Epoch(1)
LEADER = SessionId(1)
PROMPT_TOKENS = 32
WARM_UP_STEPS = 50


@dataclass
class Timing:
    """Microseconds of each step."""

    drive: list[float]
    turn: list[float]


def measure(running: int, ids_per_row: int, steps: int, frontends: int) -> Timing:
    """Decode steps with every request running and none finishing."""
    cell = Cell(CellSettings(max_queue_requests=running), EPOCH)
    length = PROMPT_TOKENS + (steps + WARM_UP_STEPS + 64) * ids_per_row
    register = Register(
        nonce=1,
        oldest_version=1,
        newest_version=1,
        group="g",
        incarnation=1,
        model="m",
        tp=1,
        num_blocks=running * (length // 16 + 2) + 64,
        block_size=16,
        max_slots=running,
        max_tokens_per_step=running * (PROMPT_TOKENS + 2),
        max_ids_per_row=ids_per_row,
        vocab_size=50_000,
        context=length + 64,
        numerics_digest=b"",
        tokenizer_digest=b"",
    )
    cell.group_joined(LEADER, register, 0.0)
    for number in range(frontends):
        cell.frontend_joined(SessionId(100 + number))
    prompt = pack_u32(np.arange(PROMPT_TOKENS))
    for rid in range(running):
        message = Submit((Choice(rid, rid),), "m", prompt, max_tokens=length, stop_ids=pack_u32([2, 3]))
        cell.submit(SessionId(100 + rid % frontends), message, 0.0)
    cell.advance(0.0)
    timing = Timing([], [])
    plans = [message.message for message in cell.take_outbox() if isinstance(message, ToLeader)][1:]
    step = 1
    while len(timing.drive) < steps + WARM_UP_STEPS:
        plan = plans.pop(0)
        assert isinstance(plan, Plan) and plan.step == step
        done = codec.encode(StepDone(EPOCH, 1, step, *_answer(cell, plan, running, ids_per_row)))
        step += 1
        began = time.perf_counter()
        message = codec.worker_side_to_scheduler.decode(done)
        assert isinstance(message, StepDone)
        cell.step_done(LEADER, message, 0.0)
        outbox = cell.take_outbox()
        encoded = codec.encode(outbox[0].message) if isinstance(outbox[0], ToLeader) else b""
        driven = time.perf_counter()
        for outgoing in outbox[1:]:
            if isinstance(outgoing, StepFrames):
                for _, frame in outgoing.build():
                    codec.encode(frame)
        ended = time.perf_counter()
        assert encoded
        plans += [outgoing.message for outgoing in outbox if isinstance(outgoing, ToLeader)]
        timing.drive.append((driven - began) * 1e6)
        timing.turn.append((ended - began) * 1e6)
    return timing


def _answer(cell: Cell, plan: Plan, running: int, ids_per_row: int) -> tuple[bytes, bytes, bytes]:
    """Every row returns as many ids as it may."""
    rows = running if plan.step > 1 or not plan.chunks else len(plan.chunks) // 8
    counts = np.full(rows, ids_per_row)
    return pack_u8(counts), pack_u32(np.arange(rows * ids_per_row) % 40_000 + 100), pack_u8(np.zeros(rows))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--ids", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--frontends", type=int, default=2)
    options = parser.parse_args()
    print("running  ids/row   drive p50   p99   us/request   turn p50   p99   us/request")
    for running in options.running:
        for ids in options.ids:
            timing = measure(running, ids, options.steps, options.frontends)
            drive, turn = (np.array(values[WARM_UP_STEPS:]) for values in (timing.drive, timing.turn))
            drive_50, drive_99 = np.percentile(drive, (50, 99))
            turn_50, turn_99 = np.percentile(turn, (50, 99))
            print(
                f"{running:7d}  {ids:7d}   {drive_50:9.0f} {drive_99:5.0f}   {drive_50 / running:10.2f}"
                f"   {turn_50:8.0f} {turn_99:5.0f}   {turn_50 / running:10.2f}"
            )


if __name__ == "__main__":
    main()
