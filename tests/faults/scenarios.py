"""What is hurt, how, and when."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tests.faults.ledger import Ask, Ledger


class Role(Enum):
    """A process of the server; the value is a pattern of its command line."""

    SUPERVISOR = r"headrace serve"
    SCHEDULER = r"headrace scheduler"
    FRONTEND = r"headrace frontend"
    LAUNCHER = r"headrace workers"
    RANK = r"headrace worker-rank|ray::RankActor"


class Phase(Enum):
    """Where the streams are when it happens."""

    QUEUED = "queued"
    """All are sent; not all fit."""
    PREFILL = "prefill"
    """All are sent, none has a token."""
    FIRST = "first token"
    MIDDLE = "middle"
    LAST = "last token"
    """Some stream lacks one token."""
    FINISH = "finish"
    """Some stream has ended."""

    def reached(self, ledgers: Sequence[Ledger], expected: Sequence[int]) -> bool:
        """Whether it is time; ``expected`` are the tokens of each whole stream."""
        seen = [ledger.tokens for ledger in ledgers]
        if self is Phase.PREFILL:
            return True
        if self in (Phase.FIRST, Phase.QUEUED):
            return any(seen)
        if self is Phase.MIDDLE:
            return sum(seen) * 2 >= sum(expected)
        if self is Phase.LAST:
            return any(have >= whole - 1 for have, whole in zip(seen, expected, strict=True))
        return any(ledger.done for ledger in ledgers)


@dataclass(frozen=True)
class Fault:
    """One blow to one process of a role."""

    role: Role
    number: signal.Signals = signal.SIGKILL
    stopped_seconds: float = 0.0
    """With SIGSTOP: how long until SIGCONT; 0: never."""
    times: int = 1
    """How often, each at a process that is alive then."""
    every: bool = False
    """All processes of the role at once."""


@dataclass(frozen=True)
class Scenario:
    """A fault at a phase."""

    name: str
    fault: Fault
    phase: Phase


def matrix() -> list[Scenario]:
    """SIGKILL, and a stop that ends, of every role at every phase; of all groups at once; and kills in a row."""
    roles = (Role.RANK, Role.SCHEDULER, Role.FRONTEND, Role.LAUNCHER)
    scenarios = [
        Scenario(f"{role.name.lower()} killed, {phase.value}", Fault(role), phase)
        for role, phase in itertools.product(roles, Phase)
    ]
    scenarios += [
        Scenario(f"{role.name.lower()} stopped for 2 s, {phase.value}", Fault(role, signal.SIGSTOP, 2.0), phase)
        for role, phase in itertools.product(roles, (Phase.PREFILL, Phase.MIDDLE))
    ]
    scenarios += [
        Scenario(f"{role.name.lower()} told to end, {phase.value}", Fault(role, signal.SIGTERM), phase)
        for role, phase in itertools.product(roles, (Phase.QUEUED, Phase.MIDDLE))
    ]
    scenarios += [
        Scenario("every group killed, middle", Fault(Role.RANK, every=True), Phase.MIDDLE),
        Scenario("scheduler killed three times, first token", Fault(Role.SCHEDULER, times=3), Phase.FIRST),
        Scenario("group killed three times, first token", Fault(Role.RANK, times=3), Phase.FIRST),
        Scenario("group hangs for good, middle", Fault(Role.RANK, signal.SIGSTOP), Phase.MIDDLE),
        Scenario("scheduler hangs for good, middle", Fault(Role.SCHEDULER, signal.SIGSTOP), Phase.MIDDLE),
    ]
    return scenarios


def random_kills(count: int, seed: int) -> list[Scenario]:
    """Kills in a row, of every role but the frontends that hold the streams."""
    chance = random.Random(seed)
    roles, phases = (Role.RANK, Role.SCHEDULER, Role.LAUNCHER), list(Phase)
    kills = []
    for number in range(count):
        role, phase, every = chance.choice(roles), chance.choice(phases), chance.random() < 0.2
        name = f"kill {number}: {'every ' * every}{role.name.lower()}, {phase.value}"
        kills.append(Scenario(name, Fault(role, every=every), phase))
    return kills


def mixed_asks(model: str, streams: int, max_tokens: int) -> list[Ask]:
    """Chats of every kind in turn: plain, seeded, with logprobs, two choices, a stop string, penalties."""
    kinds = (
        {"temperature": 0},
        {"temperature": 0.9, "seed": 11},
        {"temperature": 0, "logprobs": True, "top_logprobs": 2},
        {"temperature": 0.7, "seed": 5, "n": 2},
        {"temperature": 0, "stop": ["rhubarb!"]},
        {"temperature": 0.8, "seed": 3, "presence_penalty": 0.4, "repetition_penalty": 1.1},
    )
    return [
        Ask(
            f"stream-{index:03d}",
            "/v1/chat/completions",
            {
                "model": model,
                "messages": [{"role": "user", "content": f"stream-{index:03d}: tell me about number {index}."}],
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
                "max_tokens": max_tokens - index % 5,
                "ignore_eos": True,
                **kinds[index % len(kinds)],
            },
        )
        for index in range(streams)
    ]


def script(streams: int, delay_ms: float) -> str:
    """An engine script that gives every stream words of its own, so that a mix-up of streams shows."""
    lines = [
        f'{{"match": {{"prompt_contains": "stream-{index:03d}:"}}, "delay_ms": {delay_ms}, '
        f'"step_sizes": [1, 1, 2], "text": "{index}: {_words(index)}"}}'
        for index in range(streams)
    ]
    return "\n".join(lines) + "\n"


def _words(index: int) -> str:
    text = " ".join(f"{index}-{number} é漢" for number in range(60))
    return f"{text[:40]}rhubarb!{text[40:]}" if index % 12 == 4 else text
