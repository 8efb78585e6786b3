"""The groups that are registered, the models they serve, and which group a request goes to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from protocol.frontend import GroupLoad, ModelInfo
from protocol.ids import SessionId
from protocol.worker import Register
from scheduler.group import GroupScheduler
from scheduler.numeric_classes import ClassWaits
from scheduler.queue import WaitingQueue
from scheduler.requests import Sequence
from scheduler.step_watch import StepWatch
from scheduler.suspects import Ward, is_suspect

AFFINITY = 1.0
"""In steps: the most that a cached prefix is worth. Bounded, so a busy group loses to an idle one that must compute."""

HOME = 0.25
"""In steps, within that bound: what the group a request ran on before is worth."""


@dataclass(eq=False)
class Group:
    """One registered incarnation."""

    name: str
    incarnation: int
    session: SessionId
    register: Register
    scheduler: GroupScheduler
    watch: StepWatch
    suspect: bool = False
    failures_in_a_row: int = 0
    drain_ends: float | None = None
    """It is to go: nothing is admitted, and what runs at this time goes on elsewhere."""
    drain_reason: str = ""
    ward: Ward = field(default_factory=Ward)

    @property
    def draining(self) -> bool:
        """It is to go once it is empty."""
        return self.drain_ends is not None

    @property
    def accepts(self) -> bool:
        """Whether anything may be admitted now, blocks aside."""
        return self.scheduler.has_room and self.serves

    @property
    def serves(self) -> bool:
        """Whether something that waits may count on it."""
        return not self.suspect and self.drain_ends is None

    def is_worth_waiting_for(self, sequence: Sequence) -> bool:
        """Whether its prefix is being computed here right now."""
        return self.serves and self.scheduler.parks(sequence)

    def could_take(self, sequence: Sequence) -> bool:
        """Whether it fits this group when it runs alone, may run beside those that do now, and would go on exactly."""
        if (self.ward or is_suspect(sequence)) and not self.ward.takes(sequence, self.scheduler.running):
            return False
        if sequence.numerics and sequence.numerics != self.register.numerics_digest:
            return False
        return len(sequence.request.prompt) + sequence.request.limit <= self.scheduler.shape.effective_context

    def has_blocks_for(self, sequence: Sequence) -> bool:
        """Whether its whole prefill can be given blocks now."""
        return self.scheduler.blocks_to_admit(sequence) <= self.scheduler.free_for_admission()

    def busyness(self) -> float:
        """In full steps: prefill that waits, decodes, KV pressure; each about 1 on a busy group: none drowns another.

        All of it counts what was admitted and not yet planned, so the next newcomer sees this one.
        """
        scheduler, shape = self.scheduler, self.scheduler.shape
        prefill = scheduler.pending_prefill / shape.max_tokens_per_step
        return prefill + scheduler.running / shape.usable_slots + scheduler.blocks_used / shape.num_blocks

    def cost(self, sequence: Sequence, busyness: float) -> float:
        """In full steps, lower is better: how busy the group is, and the prefill that is not cached there.

        A prefix that is just being computed for another counts like a cached one, and waiting for it is no load: so
        the choices of one request, and those that begin alike, find each other.
        """
        scheduler, tokens = self.scheduler, self.scheduler.shape.max_tokens_per_step
        coming = scheduler.coming_tokens(sequence)
        known = (scheduler.cached_tokens(sequence) + coming) / tokens + (HOME if sequence.group == self.name else 0.0)
        waited_for = min(coming, scheduler.pending_prefill) / tokens
        return busyness - waited_for + sequence.length / tokens - min(known, AFFINITY)

    def least_cost(self, length: int, busyness: float) -> float:
        """No more than the cost of any sequence of this length, without a look at its prefix."""
        scheduler = self.scheduler
        return busyness - AFFINITY + (length - scheduler.pending_prefill) / scheduler.shape.max_tokens_per_step

    def load(self) -> GroupLoad:
        """The group's pools and counters as frontends are told."""
        statistics = self.scheduler.statistics()
        return GroupLoad(
            group=self.name,
            model=self.register.model,
            ready=not (self.suspect or self.draining),
            blocks_total=statistics.blocks.total,
            blocks_used=statistics.blocks.used,
            blocks_cached=statistics.blocks.cached,
            requests_running=statistics.running,
            requests_waiting=0,
            preemptions=statistics.preemptions,
            prompt_tokens=statistics.prompt_tokens,
            generation_tokens=statistics.generation_tokens,
            steps=statistics.steps,
            step_us=statistics.step_us,
            cached_tokens=statistics.cached_tokens,
        )


@dataclass(eq=False)
class Model:
    """A model that some group has registered; known from then on, also while its groups restart."""

    name: str
    info: ModelInfo
    queue: WaitingQueue
    groups: dict[str, Group] = field(default_factory=dict)
    open: dict[Group, None] = field(default_factory=dict)
    """Groups that may have room: those that have none leave when they are looked at, and come back when stirred."""
    without_group_since: float | None = None
    class_waits: ClassWaits = field(default_factory=ClassWaits)

    @property
    def classes(self) -> set[bytes]:
        """Numeric classes of its groups."""
        return {group.register.numerics_digest for group in self.groups.values()}

    def describe(self) -> ModelInfo:
        """What frontends are told; with no group left, what they were told last."""
        registers = [group.register for group in self.groups.values()]
        if not registers:
            self.info = _with_groups(self.info, 0)
            return self.info
        shapes = [group.scheduler.shape for group in self.groups.values()]
        self.info = ModelInfo(
            name=self.name,
            tokenizer_digest=registers[0].tokenizer_digest,
            numerics_digest=registers[0].numerics_digest,
            vocab_size=min(shape.vocab_size for shape in shapes),
            context=min(shape.effective_context for shape in shapes),
            block_size=shapes[0].block_size,
            max_ids_per_row=max(shape.max_ids_per_row for shape in shapes),
            ready_groups=sum(not group.draining for group in self.groups.values()),
        )
        return self.info

    def conflict(self, register: Register) -> str:
        """Why a group cannot join those that serve this model now; empty when it can."""
        for group in self.groups.values():
            if group.name == register.group:
                continue
            other = group.register
            if (other.tokenizer_digest, other.vocab_size) != (register.tokenizer_digest, register.vocab_size):
                return (
                    f"group {register.group} has tokenizer {register.tokenizer_digest.hex()[:12]} and a vocabulary of "
                    f"{register.vocab_size}; group {group.name} serves {self.name} with "
                    f"{other.tokenizer_digest.hex()[:12]} and {other.vocab_size}"
                )
        return ""


def new_model(register: Register, queue: WaitingQueue) -> Model:
    """A model as its first group describes it."""
    info = ModelInfo(
        register.model,
        register.tokenizer_digest,
        register.numerics_digest,
        register.vocab_size,
        register.context,
        register.block_size,
        register.max_ids_per_row,
        0,
    )
    return Model(register.model, info, queue)


def _with_groups(info: ModelInfo, ready_groups: int) -> ModelInfo:
    return ModelInfo(
        info.name,
        info.tokenizer_digest,
        info.numerics_digest,
        info.vocab_size,
        info.context,
        info.block_size,
        info.max_ids_per_row,
        ready_groups,
    )


class Offers:
    """Groups of a model that have room, during one look at its queue; and those where it can be worth waiting."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self._open: dict[Group, tuple[int, float]] = {}
        """(blocks that may surely be taken, busyness)"""
        self._computing: dict[Group, float] = {}
        """Busyness of those whose next step is full of prefills."""
        for group in groups:
            self.look_again(group)

    def __bool__(self) -> bool:
        return bool(self._open)

    def look_again(self, group: Group) -> None:
        """Something was admitted there."""
        if group.accepts:
            self._open[group] = (group.scheduler.surely_free_for_admission(), group.busyness())
            return
        self._open.pop(group, None)
        if group.scheduler.pending_prefill and group.serves:
            self._computing[group] = group.busyness()

    def cheapest(self, sequence: Sequence) -> Group | None:
        """The group of least cost among those with blocks for the whole prefill; the first wins a tie.

        It may be one that has no room yet and computes the prefix right now.
        """
        best, least, length = None, math.inf, sequence.length
        for group, (free, busyness) in self._open.items():
            shape = group.scheduler.shape
            if group.least_cost(length, busyness) >= least or not group.could_take(sequence):
                continue
            if shape.blocks_to_prefill(length) > free and not group.has_blocks_for(sequence):
                continue
            cost = group.cost(sequence, busyness)
            if cost < least:
                best, least = group, cost
        for group, busyness in self._computing.items():
            if group.is_worth_waiting_for(sequence) and group.could_take(sequence):
                cost = group.cost(sequence, busyness)
                if cost < least:
                    best, least = group, cost
        return best
