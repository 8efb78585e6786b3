"""A cell with fake groups and fake frontends around it, and a clock that the test moves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from protocol.block_hashes import pack_hashes, root_hash
from protocol.frontend import Abort, Finish, FinishReason, Frame, Load, PromptLogprobs, Reject, Submit
from protocol.ids import Epoch, SessionId
from protocol.logprobs import record_size
from protocol.packing import pack_u32, unpack_u8, unpack_u32, unpack_u64
from protocol.requests import Choice, Sampling
from protocol.worker import KillGroup, Plan, Register, Reset, RowStatus
from scheduler.cell import Cell
from scheduler.frames import StepFrames
from scheduler.group_policy import GroupPolicy
from scheduler.outbox import EndLeader, Outgoing, ToFrontend, ToFrontends, ToLaunchers, ToLeader
from scheduler.settings import CellSettings
from tests.scheduler.fake_worker import FakeWorker, id_at, record_at, register

EPOCH = Epoch(4711)
EAGER = GroupPolicy(growth_blocks=0)
"""Admits into whatever is free, so that a small pool preempts."""


def submit(
    rid: int,
    prompt: list[int] | None = None,
    *,
    seed: int = 7,
    max_tokens: int = 8,
    stop: tuple[int, ...] = (),
    resume: tuple[int, ...] = (),
    model: str = "m",
    priority: int = 0,
    remaining_ms: int | None = None,
    sampling: Sampling | None = None,
    choices: int = 1,
    block_size: int = 0,
    salt: bytes = b"",
    **fields: object,
) -> Submit:
    """A Submit of one choice, or of several with the rids that follow; its prefix is reused given a block size."""
    tokens = pack_u32(prompt if prompt is not None else [1, 2, 3, 4, 5])
    return Submit(
        choices=tuple(Choice(rid + n, seed + n, pack_u32(resume)) for n in range(choices)),
        model=model,
        tokens=tokens,
        block_hashes=pack_hashes(root_hash(salt), tokens, block_size),
        block_size=block_size,
        salt=salt,
        max_tokens=max_tokens,
        stop_ids=pack_u32(stop),
        priority=priority,
        remaining_ms=remaining_ms,
        sampling=sampling or Sampling(),
        **fields,  # type: ignore[arg-type]
    )


def expected_output(message: Submit, choice: int = 0) -> list[int]:
    """Every id a choice comes to when nothing ends it early."""
    stops = set(unpack_u32(message.stop_ids).tolist())
    output: list[int] = []
    while len(output) < message.max_tokens:
        token = id_at(message.tokens, message.choices[choice].seed, len(output))
        output.append(token)
        if token in stops and len(output) > message.sampling.min_tokens:
            break
    return output


@dataclass
class FakeFrontend:
    """Keeps what a frontend would, and checks the rules of the stream as it arrives."""

    session: SessionId
    output: dict[int, list[int]] = field(default_factory=dict)
    asked: dict[int, Submit] = field(default_factory=dict)
    judged: dict[int, int] = field(default_factory=dict)
    """Prompt tokens of each choice whose logprobs came."""
    finishes: dict[int, Finish] = field(default_factory=dict)
    rejects: dict[int, Reject] = field(default_factory=dict)
    started: dict[int, str] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    """Prompt tokens of each choice that its start found computed."""
    frames: list[Frame] = field(default_factory=list)
    steps_seen: set[tuple[str, int]] = field(default_factory=set)
    loads: list[Load] = field(default_factory=list)

    def expect(self, message: Submit) -> None:
        """A Submit was sent."""
        for choice in message.choices:
            self.output[choice.rid] = unpack_u32(choice.resume).tolist()
            self.asked[choice.rid], self.judged[choice.rid] = message, 0

    def record(self, rid: int, position: int, alternatives: int) -> bytes:
        """The logprob record of a choice's token at a position, prompt included."""
        message = self.asked[rid]
        seed = next(choice.seed for choice in message.choices if choice.rid == rid)
        return record_at(message.tokens, seed, position, alternatives)

    def receive(self, message: object) -> None:
        """A message of the scheduler."""
        if isinstance(message, Frame):
            self._frame(message)
        elif isinstance(message, Reject):
            for rid in message.rids:
                assert rid in self.output and rid not in self.rejects and rid not in self.finishes
                self.rejects[rid] = message
        elif isinstance(message, Load):
            self.loads.append(message)

    def _frame(self, frame: Frame) -> None:
        self.frames.append(frame)
        if frame.group:
            assert (frame.group, frame.step) not in self.steps_seen, "two frames for one step"
            self.steps_seen.add((frame.group, frame.step))
        for started in frame.started:
            assert started.rid not in self.started, "started twice"
            self.started[started.rid] = started.group
            self.cached[started.rid] = started.cached_tokens
            assert started.cached_tokens < len(self.asked[started.rid].tokens) // 4 or self.output[started.rid]
        for judged in frame.prompt_logprobs:
            self._judge(judged)
        ids, at, records = unpack_u32(frame.ids).tolist(), 0, []
        rows = zip(
            unpack_u64(frame.rids).tolist(), unpack_u32(frame.first).tolist(), unpack_u8(frame.counts), strict=True
        )
        for rid, first, count in rows:
            assert rid in self.output and rid not in self.finishes and rid not in self.rejects and count
            assert first == len(self.output[rid]), "indexes are contiguous"
            prompt_len, sampling = len(self.asked[rid].tokens) // 4, self.asked[rid].sampling
            for position in range(prompt_len + first, prompt_len + first + int(count)):
                records.append(self.record(rid, position, sampling.logprobs))
            assert self.judged[rid] == (prompt_len - 1 if sampling.prompt_logprobs >= 0 else 0), "prompt before output"
            self.output[rid] += ids[at : at + count]
            at += count
        assert at == len(ids) and frame.logprobs == b"".join(records), "one record per id, in row order"
        for finish in frame.finishes:
            assert finish.rid in self.output and finish.rid not in self.finishes and finish.rid not in self.rejects
            assert finish.count == len(self.output[finish.rid])
            message = self.asked[finish.rid]
            if (
                finish.reason is FinishReason.LENGTH
                and not message.max_tokens
                and message.sampling.prompt_logprobs >= 0
            ):
                assert self.judged[finish.rid] == len(message.tokens) // 4 - 1
            self.finishes[finish.rid] = finish

    def _judge(self, judged: PromptLogprobs) -> None:
        rid, alternatives = judged.rid, self.asked[judged.rid].sampling.prompt_logprobs
        assert rid not in self.finishes and alternatives >= 0 and judged.records
        assert judged.first == self.judged[rid] + 1, "every position once, in order"
        count = len(judged.records) // record_size(alternatives)
        expected = [self.record(rid, judged.first + n, alternatives) for n in range(count)]
        assert judged.records == b"".join(expected)
        self.judged[rid] += count

    @property
    def open(self) -> set[int]:
        """Choices that still await their end."""
        return self.output.keys() - self.finishes.keys() - self.rejects.keys()


class Rig:
    """Everything around a cell."""

    def __init__(self, settings: CellSettings | None = None, seed: int = 0) -> None:
        self.cell = Cell(settings or CellSettings(group=EAGER), EPOCH)
        self.now = 100.0
        self.rng = random.Random(seed)
        self.workers: dict[SessionId, FakeWorker] = {}
        self.frontends: dict[SessionId, FakeFrontend] = {}
        self.submitted: dict[tuple[SessionId, int], Submit] = {}
        self.kills: list[KillGroup] = []
        self.ended_leaders: list[SessionId] = []
        self.log: list[Outgoing] = []
        self._sessions = 0

    # ------------------------------------------------------------------------------------------------------ peers

    def frontend(self) -> FakeFrontend:
        """A frontend joins."""
        frontend = FakeFrontend(self._next_session())
        self.frontends[frontend.session] = frontend
        self.cell.frontend_joined(frontend.session)
        return frontend

    def group(self, registration: Register | None = None) -> FakeWorker:
        """A group registers."""
        worker = FakeWorker(registration or register(), self.rng)
        assert not self.cell.refusal(worker.registration)
        session = self._next_session()
        for old, other in list(self.workers.items()):
            if other.registration.group == worker.registration.group:
                del self.workers[old]
        for frontend in self.frontends.values():  # steps begin anew
            frontend.steps_seen = {seen for seen in frontend.steps_seen if seen[0] != worker.registration.group}
        self.workers[session] = worker
        self.cell.group_joined(session, worker.registration, self.now)
        self.turn()
        return worker

    def session_of(self, worker: FakeWorker) -> SessionId:
        return next(session for session, other in self.workers.items() if other is worker)

    def lose(self, worker: FakeWorker) -> None:
        """A group dies."""
        session = self.session_of(worker)
        del self.workers[session]
        self.cell.group_lost(session, "died", self.now)
        self.turn()

    # ----------------------------------------------------------------------------------------------------- events

    def submit(self, frontend: FakeFrontend, message: Submit) -> None:
        frontend.expect(message)
        for choice in message.choices:
            self.submitted[frontend.session, choice.rid] = message
        self.cell.submit(frontend.session, message, self.now)
        self.turn()

    def abort(self, frontend: FakeFrontend, *rids: int) -> None:
        self.cell.abort(frontend.session, Abort(rids))
        self.turn()

    def step(self, worker: FakeWorker, statuses: dict[int, RowStatus] | None = None) -> None:
        """One step of one group; ``statuses`` by row."""
        done = worker.step(lambda batch: statuses or {})
        self.cell.step_done(self.session_of(worker), done, self.now)
        self.turn()

    def fail(self, worker: FakeWorker, *, kv_survived: bool = True) -> None:
        """The oldest plan of a group fails."""
        self.cell.step_failed(self.session_of(worker), worker.fail(kv_survived=kv_survived), self.now)
        self.turn()

    def turn(self, seconds: float = 0.0) -> None:
        """Time passes; the cell acts; messages arrive."""
        self.now += seconds
        self.cell.advance(self.now)
        for outgoing in self.cell.take_outbox():
            self.log.append(outgoing)
            self._route(outgoing)
        self.cell.check_integrity()

    def run_until_idle(self, most: int = 10_000) -> None:
        """Step every group until nothing is left to do."""
        for _ in range(most):
            busy = [worker for worker in self.workers.values() if worker.plans]
            if not busy:
                assert self.cell.idle or not self.workers, "requests are left and nothing is planned for them"
                return
            for worker in busy:
                if worker.plans:
                    self.step(worker)
        raise AssertionError("the cell does not come to rest")

    # ----------------------------------------------------------------------------------------------------- checks

    def check_outcomes(self) -> None:
        """Every request got exactly what its prompt and seed say, or a clean part of it."""
        for (session, rid), message in self.submitted.items():
            frontend = self.frontends.get(session)
            if frontend is None or rid in frontend.rejects:
                continue
            choice = next(at for at, choice in enumerate(message.choices) if choice.rid == rid)
            expected, output, finish = expected_output(message, choice), frontend.output[rid], frontend.finishes[rid]
            assert output == expected[: len(output)]
            if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert output == expected
                ends_in_stop = bool(output) and output[-1] in unpack_u32(message.stop_ids).tolist()
                ends_in_stop &= len(output) > message.sampling.min_tokens
                assert (finish.reason is FinishReason.STOP) == ends_in_stop
                assert finish.stop_id == (output[-1] if ends_in_stop else -1)

    def check_at_rest(self) -> None:
        """Nothing runs: no block is used, nothing waits."""
        self.cell.check_integrity()
        load = self.cell.load(self.now)
        assert (load.requests_running, load.requests_waiting, load.waiting_tokens) == (0, 0, 0)
        assert all(group.blocks_used == 0 for group in load.groups)
        assert all(not frontend.open for frontend in self.frontends.values())

    def plans(self) -> list[Plan]:
        """Every plan sent so far."""
        sent = [outgoing.message for outgoing in self.log if isinstance(outgoing, ToLeader)]
        return [message for message in sent if isinstance(message, Plan)]

    def _next_session(self) -> SessionId:
        self._sessions += 1
        return SessionId(self._sessions)

    def _route(self, outgoing: Outgoing) -> None:
        if isinstance(outgoing, ToLeader):
            if outgoing.session in self.workers:
                self.workers[outgoing.session].receive(outgoing.message)
        elif isinstance(outgoing, StepFrames):
            for session, frame in outgoing.build():
                self.frontends[session].receive(frame)
        elif isinstance(outgoing, ToFrontend):
            self.frontends[outgoing.session].receive(outgoing.message)
        elif isinstance(outgoing, ToFrontends):
            for frontend in self.frontends.values():
                frontend.receive(outgoing.message)
        elif isinstance(outgoing, ToLaunchers):
            assert isinstance(outgoing.message, KillGroup)
            self.kills.append(outgoing.message)
        elif isinstance(outgoing, EndLeader):
            self.ended_leaders.append(outgoing.session)
            self.workers.pop(outgoing.session, None)


__all__ = ["EPOCH", "FakeFrontend", "Reset", "Rig", "expected_output", "submit"]
