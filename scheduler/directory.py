"""The groups that are registered, the models they serve, and which group a request goes to."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.frontend import GroupLoad, ModelInfo
from protocol.ids import SessionId
from protocol.worker import Register
from scheduler.group import GroupScheduler
from scheduler.queue import WaitingQueue
from scheduler.requests import Sequence
from scheduler.step_watch import StepWatch

AFFINITY = 0.25
"""In steps: what the group a request ran on before is worth. Bounded, so a busy group loses to an idle one."""


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

    @property
    def accepts(self) -> bool:
        """Whether anything may be admitted now, blocks aside."""
        return not self.suspect and self.scheduler.has_room

    def could_hold(self, sequence: Sequence) -> bool:
        """Whether the request fits this group when it runs alone."""
        return len(sequence.request.prompt) + sequence.request.limit <= self.scheduler.shape.effective_context

    def cost(self, sequence: Sequence) -> float:
        """Placement cost in full steps: prefill not cached, decodes, KV pressure; lower is better.

        Each of the three is about 1 on a busy group, so that none drowns the others.
        """
        scheduler, shape = self.scheduler, self.scheduler.shape
        prefill = (scheduler.pending_prefill + sequence.length) / shape.max_tokens_per_step
        decodes = scheduler.running / shape.usable_slots
        pressure = scheduler.blocks_used / shape.num_blocks
        return prefill + decodes + pressure - (AFFINITY if sequence.group == self.name else 0.0)

    def load(self) -> GroupLoad:
        """The group's pools and counters as frontends are told."""
        statistics = self.scheduler.statistics()
        return GroupLoad(
            group=self.name,
            model=self.register.model,
            ready=not self.suspect,
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
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    groups: dict[str, Group] = field(default_factory=dict)
    without_group_since: float | None = None

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
            ready_groups=len(registers),
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


def new_model(register: Register) -> Model:
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
    return Model(register.model, info)


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


def cheapest(sequence: Sequence, free_blocks: dict[Group, int]) -> Group | None:
    """The group of least cost among those with blocks for the whole prefill; the first registered wins a tie."""
    fitting = [
        group
        for group, free in free_blocks.items()
        if group.scheduler.blocks_to_admit(sequence) <= free and group.could_hold(sequence)
    ]
    return min(fitting, key=lambda group: group.cost(sequence), default=None)
