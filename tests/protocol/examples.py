"""One full example of every message, for golden bytes and for fuzzing."""

from __future__ import annotations

from typing import Any

from protocol import codec
from protocol.base import Wire
from protocol.frontend import (
    Abort,
    Credit,
    Drain,
    Finish,
    FinishReason,
    Frame,
    Frames,
    GroupLoad,
    Hello,
    Inquire,
    Limits,
    Load,
    ModelDown,
    ModelInfo,
    ModelUp,
    Phase,
    PromptLogprobs,
    Reject,
    RejectCode,
    Span,
    Started,
    Submit,
    Timeline,
    Told,
    Welcome,
)
from protocol.packing import pack_u8, pack_u32, pack_u64
from protocol.requests import Choice, Grammar, Reasoning, Sampling
from protocol.session import Ping, Pong, Unwelcome
from protocol.worker import (
    AdapterDone,
    DrainGroup,
    GroupDown,
    GroupUp,
    KillGroup,
    LauncherHello,
    LoadAdapter,
    Plan,
    Prepare,
    Register,
    Reset,
    RowStatus,
    SetGroups,
    SlotAdd,
    StepDone,
    StepFailed,
    Stop,
    UnloadAdapter,
    WorkerWelcome,
)

BIG = 2**64 - 1
MODEL = ModelInfo("m", b"t" * 16, b"n" * 16, 49152, 8192, 16, 1, 2)
SAMPLING = Sampling(
    0.5, 0.9, 40, 0.05, 1.0, -1.0, 1.1, 3, 5, 2, b"\1\0\0\0\0\0\x80?", pack_u32([7]), (pack_u32([8, 9]),)
)

FROM_FRONTEND: tuple[Wire, ...] = (
    Hello(BIG, 2, 1, 1),
    Submit(
        choices=(Choice(1, BIG, pack_u32([5, 6]), 1, b"n" * 16), Choice(2, 3)),
        model="m",
        tokens=pack_u32([1, 2, 3]),
        max_tokens=16,
        sampling=SAMPLING,
        stop_ids=pack_u32([0, 2]),
        block_hashes=b"h" * 16,
        priority=-1,
        tenant="key",
        remaining_ms=1500,
        salt=b"s",
        grammar=Grammar("regex", "a+"),
        reasoning=Reasoning(pack_u32([10]), pack_u32([11]), True, 64, pack_u32([11])),
        adapter="a",
        block_size=3,
    ),
    Abort((1, BIG)),
    Inquire(BIG, (1, BIG)),
    Ping(9),
)
TO_FRONTEND: tuple[Wire, ...] = (
    Welcome(BIG, 4, 5, 1, (MODEL,), Limits(256, 1024, 1_000_000), Credit(10, 1000, 5, 1500, 7, 70)),
    Unwelcome(4, "no session", True),
    Frame(
        "g0",
        7,
        pack_u64([1, BIG]),
        pack_u32([0, 5]),
        pack_u8([1, 2]),
        pack_u32([11, 12, 13]),
        (Finish(1, FinishReason.STOP, 1, 11, "why"),),
        (Started(BIG, "g0", 32, b"n" * 16),),
        b"l",
        (PromptLogprobs(BIG, 1, b"p"),),
    ),
    Frames((Frame("g0", 7, pack_u64([1]), pack_u32([0]), pack_u8([1]), pack_u32([11])), Frame("", 0))),
    Reject((1, 2), RejectCode.OVERLOADED, "full", 900),
    Load(
        Credit(1, 2, 3, 4, 5, 6),
        3,
        4,
        5,
        6,
        (GroupLoad("g0", "m", True, 100, 10, 20, 3, 0, 1, 2, 3, 4, 5, 6),),
        (1, 2, 1),
        7,
    ),
    Told(
        BIG,
        (
            Timeline(
                1, 90, 80, Phase.ENDED, 10, 20, 50, 6, 4, 9, 2, 1, 3, "stop", "m", (Span(Phase.DECODE, "g0", 30, 50),)
            ),
        ),
    ),
    ModelUp(MODEL),
    ModelDown("m", "its group died"),
    Pong(4, 9),
    Drain(30_000),
)
FROM_WORKER_SIDE: tuple[Wire, ...] = (
    Register(BIG, 1, 1, "g0", 3, "m", 2, 1000, 16, 64, 512, 8, 49152, 8192, b"n" * 16, b"t" * 16, ("a",)),
    StepDone(
        4,
        3,
        7,
        pack_u8([1, 0]),
        pack_u32([11]),
        pack_u8([RowStatus.OK, RowStatus.NAN]),
        900,
        5,
        1,
        100,
        25,
        b"lp",
        b"p",
    ),
    StepFailed(4, 3, 7, "gap", True, "expected 6"),
    AdapterDone("a", False, "no such file"),
    Ping(9),
    LauncherHello(BIG, 1, 1, 6),
    GroupUp("g0", 3, "m"),
    GroupDown("g0", 3, "rank 1 exited with status 1"),
    DrainGroup("g0", 3, 30_000, "one group less is wanted"),
)
TO_LEADER: tuple[Wire, ...] = (
    WorkerWelcome(BIG, 4, 5, 1),
    Unwelcome(4, "no session", False),
    Plan(
        4,
        3,
        7,
        drops=pack_u32([0]),
        adds=(SlotAdd(1, pack_u32([1, 2, 3]), 2, BIG, SAMPLING, pack_u32([0]), 1, "a"),),
        blocks=pack_u32([1, 9]),
        chunks=pack_u32([1, 2]),
        skips=pack_u32([4]),
    ),
    Prepare(b"k", Grammar("json_object", "{}")),
    LoadAdapter("a", "/adapters/a"),
    UnloadAdapter("a"),
    Reset(4, 1),
    Pong(4, 9),
    Stop("drained"),
)
TO_LAUNCHER: tuple[Wire, ...] = (
    WorkerWelcome(BIG, 4, 5, 1),
    Unwelcome(4, "no session", False),
    Pong(4, 9),
    KillGroup("g0", 3, "a step is overdue"),
    SetGroups("m", 2),
    Stop("drained"),
)

DIRECTIONS: dict[str, tuple[codec.Decoder[Any], tuple[Wire, ...]]] = {
    "frontend_to_scheduler": (codec.frontend_to_scheduler, FROM_FRONTEND),
    "scheduler_to_frontend": (codec.scheduler_to_frontend, TO_FRONTEND),
    "worker_side_to_scheduler": (codec.worker_side_to_scheduler, FROM_WORKER_SIDE),
    "scheduler_to_leader": (codec.scheduler_to_leader, TO_LEADER),
    "scheduler_to_launcher": (codec.scheduler_to_launcher, TO_LAUNCHER),
}
