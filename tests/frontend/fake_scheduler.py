"""The other end of a frontend's session: real sockets, a thread of its own, and answers by script.

It keeps the protocol's promises (one finish or reject per choice, tokens and finish together, resumes go on where they
stopped) unless a script breaks them on purpose, and it knows nothing of blocks, groups or fairness.
"""

from __future__ import annotations

import math
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import msgspec
import numpy as np
import zmq

from protocol import codec
from protocol.frontend import (
    Abort,
    Credit,
    Finish,
    FinishReason,
    Frame,
    Hello,
    Inquire,
    Limits,
    ModelInfo,
    ModelUp,
    PromptLogprobs,
    Reject,
    RejectCode,
    Started,
    Submit,
    Timeline,
    Told,
    Welcome,
)
from protocol.ids import random_u64
from protocol.keys import NullSecurity
from protocol.logprobs import pack_records
from protocol.packing import pack_u8, pack_u32, pack_u64, unpack_u32
from protocol.session import Ping, Pong, Unwelcome
from protocol.transport import Transport

WAIT_SECONDS = 20.0
GROUP = "group-0"
NUMERICS = b"numeric class..."


@dataclass(frozen=True)
class Script:
    """What becomes of a submitted choice."""

    ids: Sequence[int] = ()
    """Its whole output; once used up, nothing more comes unless a stop id or the limit ended it."""
    steps: Sequence[int] = (1,)
    """Ids a step, over and over."""
    gate: int | None = None
    """Ids let through before ``open_gates``; None lets all through."""
    reject: RejectCode | None = None
    retry_after_ms: int = 0
    fault_at: int | None = None
    """Index at which the row fails."""
    cached: int = 0
    skip_frame_at: int | None = None
    """The first frame that would start at this index or later is lost, once."""
    fault: FinishReason = FinishReason.ERROR
    """How."""
    deadline_at: int | None = None
    """Index at which the scheduler finds the deadline passed."""
    admit: bool = True
    """False leaves the choice in the queue for ever."""
    prompt_cuts: Sequence[int] = ()
    """Where prefill chunks end, for the logprobs of the prompt."""
    scores_prompt: bool = True
    """False breaks the promise of prompt logprobs."""

    variants: Sequence[Sequence[int]] = ()
    """Outputs of the choices after the first, over and over; empty: all have the same."""

    def of_choice(self, at: int) -> Script:
        """What becomes of one of several choices."""
        ids = self.ids if at == 0 or not self.variants else self.variants[(at - 1) % len(self.variants)]
        return replace(self, ids=ids)

    @classmethod
    def text(cls, text: str | bytes, *, eos: int | None = 258, **options: Any) -> Script:
        """The bytes of a text as ids of the byte tokenizer, ended by its end token."""
        data = text.encode() if isinstance(text, str) else text
        return cls([*data, *([] if eos is None else [eos])], **options)


@dataclass
class Job:
    """A choice under way."""

    peer: bytes
    rid: int
    script: Script
    submit: Submit
    position: int
    stops: frozenset[int]
    sizes: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = cycle(self.script.steps)


class FakeScheduler:
    """Answers every Submit by ``script``, which may be replaced at any time."""

    def __init__(self, address: str, model: ModelInfo, *, registered: bool = True) -> None:
        self.model = model
        self.registered = registered
        self.credit = Credit(1_000_000, 1_000_000_000)
        self.script: Callable[[Submit], Script] = lambda submit: Script.text("ok")
        self.submits: list[Submit] = []
        self.aborted: list[int] = []
        self.jobs: dict[int, Job] = {}
        self.sessions = 0
        self.timelines: dict[int, Timeline] = {}
        """What it says when it is asked about a choice."""
        self.refusal = ""
        """Why no frontend is ever welcome."""
        self._lost_once: set[int] = set()
        self._gates_open = False
        self._mute = False
        self._peers: set[bytes] = set()
        self._epoch = random_u64()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._transport = Transport.listen(address, security=NullSecurity(), context=self._context)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="fake-scheduler", daemon=True)
        self._thread.start()

    # What tests do; any thread.

    def order(self, action: Callable[[], None]) -> None:
        """Run something on the scheduler's thread, soon."""
        self._orders.put(action)
        self._wake_writer.send(b"\0")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition on this object's state."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_SECONDS), f"never: {what}"

    def open_gates(self) -> None:
        self.order(lambda: setattr(self, "_gates_open", True))

    def restart(self, *, registered: bool = True) -> None:
        """Forget everything, as a new scheduler would have, and say so."""
        self.order(lambda: self._restart(registered))

    def mute(self) -> None:
        """Answer no greeting any more."""
        self.order(lambda: setattr(self, "_mute", True))

    def register(self, model: ModelInfo | None = None) -> None:
        """The model's group registers (again), perhaps with another description."""
        self.order(lambda: self._register(model or self.model))

    def broadcast(self, message: Any) -> None:
        self.order(lambda: [self._send(peer, message) for peer in self._peers] and None)

    def send_raw(self, frames: Sequence[bytes]) -> None:
        """Bytes that need be no message."""
        self.order(lambda: [self._transport.send(frame, peer) for peer in self._peers for frame in frames] and None)

    def close(self) -> None:
        self._closing = True
        self._wake_writer.send(b"\0")
        self._thread.join()
        self._transport.close()
        self._context.term()
        self._wake_reader.close()
        self._wake_writer.close()

    # The scheduler's thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._transport.socket, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        while not self._closing:
            busy = any(self._can_step(job) for job in self.jobs.values())
            for ready, _ in poller.poll(0 if busy else 10_000):
                if ready == self._wake_reader.fileno():
                    self._wake_reader.recv(4096)
            with self._changed:
                while not self._orders.empty():
                    self._orders.get()()
                while (received := self._transport.receive()) is not None:
                    self._receive(received[0], codec.frontend_to_scheduler.decode(received[1]))
                for job in list(self.jobs.values()):
                    if self._can_step(job):
                        self._step(job)
                self._changed.notify_all()

    def _receive(self, peer: bytes, message: Any) -> None:
        if self.refusal and isinstance(message, Hello):
            self._send(peer, Unwelcome(self._epoch, self.refusal, final=True))
            return
        if self._mute and isinstance(message, Hello):
            return
        if isinstance(message, Hello):
            self._peers = {peer}
            self.sessions += 1
            models = (self.model,) if self.registered else ()
            limits = Limits(256, 1000, 1_000_000)
            self._send(peer, Welcome(message.nonce, self._epoch, self.sessions, 1, models, limits, self.credit))
        elif peer not in self._peers:
            self._send(peer, Unwelcome(self._epoch, "not in session"))
        elif isinstance(message, Ping):
            self._send(peer, Pong(self._epoch, 0))
        elif isinstance(message, Submit):
            self._submit(peer, message)
        elif isinstance(message, Abort):
            self._abort(peer, message)
        elif isinstance(message, Inquire):
            known = tuple(self.timelines[rid] for rid in message.rids if rid in self.timelines)
            self._send(peer, Told(message.nonce, known))

    def _submit(self, peer: bytes, submit: Submit) -> None:
        self.submits.append(submit)
        script = self.script(submit)
        if script.reject is not None:
            rids = tuple(choice.rid for choice in submit.choices)
            self._send(peer, Reject(rids, script.reject, "rejected by script", script.retry_after_ms))
            return
        if not script.admit:
            return
        for at, choice in enumerate(submit.choices):
            stops = frozenset(unpack_u32(submit.stop_ids).tolist())
            self.jobs[choice.rid] = Job(peer, choice.rid, script.of_choice(at), submit, len(choice.resume) // 4, stops)
            started = (Started(choice.rid, GROUP, script.cached, NUMERICS),)
            self._send(peer, Frame(GROUP, 0, started=started))
            if submit.sampling.prompt_logprobs >= 0 and script.scores_prompt:
                self._score_prompt(peer, choice.rid, submit, script.prompt_cuts)
            if submit.max_tokens == 0:
                del self.jobs[choice.rid]
                self._send(peer, Frame(GROUP, 1, finishes=(Finish(choice.rid, FinishReason.LENGTH, 0),)))

    def _score_prompt(self, peer: bytes, rid: int, submit: Submit, cuts: Sequence[int]) -> None:
        ids = unpack_u32(submit.tokens).tolist()
        start = 1
        for end in (*(cut for cut in cuts if 1 < cut < len(ids)), len(ids)):
            records = records_of(ids[start:end], start, submit.sampling.prompt_logprobs)
            self._send(peer, Frame(GROUP, 1, prompt_logprobs=(PromptLogprobs(rid, start, records),)))
            start = end

    def _abort(self, peer: bytes, abort: Abort) -> None:
        self.aborted.extend(abort.rids)
        for rid in abort.rids:
            job = self.jobs.pop(rid, None)
            if job is not None:
                self._send(peer, Frame("", 0, finishes=(Finish(rid, FinishReason.ABORT, job.position),)))

    def _can_step(self, job: Job) -> bool:
        script = job.script
        gated = script.gate is not None and not self._gates_open and job.position >= script.gate
        done = job.position >= len(script.ids) and job.position not in (script.fault_at, script.deadline_at)
        return not gated and not done

    def _step(self, job: Job) -> None:
        """One step: ids and, in the same frame, the finish they bring."""
        script, first = job.script, job.position
        finish: Finish | None = None
        end = min(first + next(job.sizes), len(script.ids))
        if script.gate is not None and not self._gates_open:
            end = min(end, script.gate)
        ids: list[int] = []
        for position in range(first, end):
            if position in (script.fault_at, script.deadline_at):
                break
            ids.append(script.ids[position])
            count = position + 1
            if ids[-1] in job.stops and position >= job.submit.sampling.min_tokens:
                finish = Finish(job.rid, FinishReason.STOP, count, stop_id=ids[-1])
            elif count == job.submit.max_tokens:
                finish = Finish(job.rid, FinishReason.LENGTH, count)
            if finish is not None:
                break
        job.position = first + len(ids)
        if finish is None and job.position == script.fault_at:
            finish = Finish(job.rid, script.fault, job.position, message="the engine failed by script")
        if finish is None and job.position == script.deadline_at:
            finish = Finish(job.rid, FinishReason.DEADLINE, job.position)
        if finish is not None:
            del self.jobs[job.rid]
        lost = script.skip_frame_at is not None and first >= script.skip_frame_at and not self._lost_once
        if lost:
            self._lost_once.add(job.rid)
            return
        frame = Frame(
            GROUP,
            1,
            rids=pack_u64([job.rid]),
            first=pack_u32([first]),
            counts=pack_u8([len(ids)]),
            ids=pack_u32(ids),
            finishes=() if finish is None else (finish,),
            logprobs=records_of(ids, first, job.submit.sampling.logprobs),
        )
        self._send(job.peer, frame)

    def _restart(self, registered: bool) -> None:
        self._epoch = random_u64()
        self.registered = registered
        self.jobs.clear()
        peers, self._peers = self._peers, set()
        for peer in peers:
            self._send(peer, Unwelcome(self._epoch, "restarted"))

    def _register(self, model: ModelInfo) -> None:
        self.model, self.registered = model, True
        for peer in self._peers:
            self._send(peer, ModelUp(model))

    def _send(self, peer: bytes, message: Any) -> None:
        self._transport.send(codec.encode(message), peer)


def records_of(ids: Sequence[int], first: int, alternatives: int) -> bytes:
    """Logprobs that depend on position and id alone; some are minus infinity."""
    if alternatives < 0:
        return b""
    rows = [score_of(token, first + at, alternatives) for at, token in enumerate(ids)]
    pairs = np.array([row[1] for row in rows], dtype=np.float64).reshape(len(ids), 1 + alternatives, 2)
    return pack_records(np.array([row[0] for row in rows]), pairs[:, :, 0], pairs[:, :, 1], alternatives)


def score_of(token: int, position: int, alternatives: int) -> tuple[int, list[tuple[int, float]]]:
    """(rank, [(id, logprob) …]): every fourth token is the likeliest, the others are no alternative of theirs."""
    others = [((token + 1 + at) % 259, -0.25 * (1 + at)) for at in range(alternatives)]
    if position % 4 == 0:
        return 1, [(token, -0.125), *([(token, -0.125), *others][:alternatives])]
    value = -math.inf if position % 4 == 3 else -8.0 - position / 16
    return 30, [(token, value), *others]


def described(name: str, digest: bytes, **changes: Any) -> ModelInfo:
    """A registered byte-tokenizer model."""
    model = ModelInfo(
        name=name,
        tokenizer_digest=digest,
        numerics_digest=b"\x0f" * 16,
        vocab_size=259,
        context=1000,
        block_size=16,
        max_ids_per_row=8,
        ready_groups=1,
    )
    return msgspec.structs.replace(model, **changes)
