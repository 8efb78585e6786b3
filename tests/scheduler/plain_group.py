"""A group's scheduler as one would write it without arrays: lists and loops, one object per sequence.

It follows the same policy from the same words and shares no code with ``scheduler.group`` but the shape, the pace and
what a request is (each has its own), so that the two can be held against each other plan by plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from protocol.frontend import FinishReason
from protocol.packing import pack_u32
from protocol.worker import RowStatus
from scheduler.group_policy import GroupPolicy
from scheduler.pacing import PrefillPace
from scheduler.requests import Sequence
from scheduler.shape import PLANS_IN_FLIGHT, GroupShape


def failure(status: RowStatus) -> FinishReason:
    """How a row's failure ends its sequence."""
    return FinishReason.NO_TOKEN if status is RowStatus.EMPTY_SUPPORT else FinishReason.ERROR


@dataclass
class Tenant:
    """A sequence in a slot."""

    sequence: Sequence
    slot: int
    tokens: list[int]
    prompt_len: int
    target: int
    blocks: list[int]
    registered: int
    computed: int
    planned: int
    under_way: int = 0
    last_step: int = 0
    gone: bool = False

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def rank(self) -> tuple[int, int]:
        return self.sequence.rank

    @property
    def certain(self) -> int:
        """Leading tokens whose KV is there."""
        return self.computed if self.computed < self.target else max(self.computed, len(self.tokens) - 1)


@dataclass
class Row:
    """What a plan asked of a tenant."""

    tenant: Tenant
    samples: bool
    length: int
    is_chunk: bool


@dataclass
class PlainPlan:
    """The fields of a Plan, unpacked."""

    step: int
    drops: list[int]
    adds: list[tuple[int, bytes, int]]
    """(slot, tokens, computed)"""
    blocks: list[tuple[int, int]]
    chunks: list[tuple[int, int]]
    skips: list[int]
    rows: list[Row]


@dataclass
class PlainOutcome:
    """What a StepDone meant."""

    delivered: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(rid, first index, ids)"""
    finished: list[tuple[int, FinishReason, int, int]] = field(default_factory=list)
    """(rid, reason, count, stop id)"""


class PlainGroup:
    """The twin of GroupScheduler."""

    def __init__(self, shape: GroupShape, policy: GroupPolicy) -> None:
        self.shape, self.policy = shape, policy
        self.pace = PrefillPace(policy.prefill_stretch, shape.max_tokens_per_step)
        self.plain = list(range(shape.num_blocks))
        self.cached: list[int] = []
        self.owners = [0] * shape.num_blocks
        self.block_of: dict[bytes, int] = {}
        self.tenants: dict[int, Tenant] = {}
        self.slot_order: list[int] = list(range(shape.usable_slots))[::-1]
        self.out: list[PlainPlan] = []
        self.last_planned = self.last_done = 0
        self.drops: list[int] = []
        self.new: list[Tenant] = []
        self.settling: list[Tenant] = []
        self.requeued: list[Sequence] = []
        self.writers: dict[bytes, Tenant] = {}
        self.preemptions = 0

    # ------------------------------------------------------------------------------------------------------ blocks

    @property
    def free(self) -> int:
        return len(self.plain) + len(self.cached)

    def take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            if self.plain:
                block = self.plain.pop(0)
            else:
                block = self.cached.pop(0)
                self.block_of = {name: other for name, other in self.block_of.items() if other != block}
            self.owners[block] = 1
            taken.append(block)
        return taken

    def give_back(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.owners[block] -= 1
            if not self.owners[block]:
                if block in self.block_of.values():
                    self.cached.append(block)
                else:
                    self.plain.insert(0, block)

    def chain(self, sequence: Sequence, blocks: int) -> list[bytes]:
        request = sequence.request
        if not self.policy.index_bytes or request.hash_block_size != self.shape.block_size:
            return []
        return [*sequence.chain_to(blocks)][:blocks]

    def found(self, sequence: Sequence) -> int:
        """Blocks of it that are there: a walk."""
        chain = self.chain(sequence, sequence.reusable // self.shape.block_size)
        return next((at for at, name in enumerate(chain) if name not in self.block_of), len(chain))

    def register(self, tenant: Tenant) -> None:
        full = tenant.certain // self.shape.block_size
        for name in self.chain(tenant.sequence, full)[tenant.registered :]:
            block = tenant.blocks[tenant.registered]
            if self.block_of.setdefault(name, block) != block:
                return
            tenant.registered += 1

    # --------------------------------------------------------------------------------------------------- admission

    def free_for_admission(self) -> int:
        if not self.tenants:
            return self.free
        return (
            self.free
            - self.shape.watermark
            - sum(self.wanted(each, self.growth(each)) for each in self.tenants.values())
        )

    def growth(self, tenant: Tenant) -> int:
        """Tokens that it is to be able to grow by."""
        left = tenant.sequence.request.limit - tenant.outputs
        return min(self.policy.growth_blocks * self.shape.block_size, max(left, 0))

    def parks(self, sequence: Sequence) -> bool:
        chain = self.chain(sequence, sequence.reusable // self.shape.block_size)
        found = self.found(sequence)
        writer = self.writers.get(chain[found]) if found < len(chain) else None
        return writer is not None and writer.sequence.request.priority <= sequence.request.priority

    def blocks_to_admit(self, sequence: Sequence) -> int:
        shared = [self.block_of[name] for name in self.chain(sequence, self.found(sequence))]
        held = sum(1 for block in shared if self.owners[block])
        return -(-(sequence.length + self.shape.max_ids_per_row - 1) // self.shape.block_size) - held

    def admit(self, sequence: Sequence) -> None:
        found = self.found(sequence)
        shared = [self.block_of[name] for name in self.chain(sequence, found)]
        for block in shared:
            if not self.owners[block]:
                self.cached.remove(block)
            self.owners[block] += 1
        count = -(-(sequence.length + self.shape.max_ids_per_row - 1) // self.shape.block_size)
        slot = self.slot_order.pop()
        cached = found * self.shape.block_size
        tokens = [*sequence.request.prompt.tolist(), *sequence.output.tolist()]
        tenant = Tenant(
            sequence,
            slot,
            tokens,
            len(sequence.request.prompt),
            target=len(tokens),
            blocks=[*shared, *self.take(count - found)],
            registered=found,
            computed=cached,
            planned=cached,
        )
        for name in self.chain(sequence, len(tokens) // self.shape.block_size)[found:]:
            self.writers.setdefault(name, tenant)
        self.tenants[slot] = tenant
        self.new.append(tenant)

    # -------------------------------------------------------------------------------------------------------- plan

    def decoding(self) -> list[Tenant]:
        return [
            tenant
            for _, tenant in sorted(self.tenants.items())
            if tenant.planned >= tenant.target and tenant.outputs + tenant.under_way < tenant.sequence.request.limit
        ]

    def wanted(self, tenant: Tenant, growth: int = 0) -> int:
        """Blocks it lacks for one more step, and some growth, if every plan under way returns the most ids."""
        most = self.shape.max_ids_per_row
        reach = len(tenant.tokens) + tenant.under_way * most + most - 1 + growth
        return max(-(-reach // self.shape.block_size) - len(tenant.blocks), 0)

    def plan(self) -> PlainPlan | None:
        if len(self.out) == PLANS_IN_FLIGHT:
            return None
        rows = self.decoding()
        growth: list[tuple[int, int]] = []
        if sum(map(self.wanted, rows)) > self.free:
            rows = self.grow_by_rank(rows, growth)
        else:
            for tenant in rows:
                self.grow(tenant, growth)
        skips = [
            slot for slot, each in sorted(self.tenants.items()) if each.planned >= each.target and each not in rows
        ]
        chunks = self.plan_chunks(len(rows))
        if not rows and not chunks:
            return None
        self.last_planned += 1
        made = [Row(tenant, True, 1, False) for tenant in rows]
        made += [Row(tenant, tenant.planned >= tenant.target, length, True) for tenant, length in chunks]
        for row in made:
            row.tenant.under_way += row.samples
            row.tenant.last_step = self.last_planned
        plan = PlainPlan(
            step=self.last_planned,
            drops=self.drops,
            adds=[(each.slot, pack_u32(each.tokens), each.computed) for each in self.new],
            blocks=[(each.slot, block) for each in self.new for block in each.blocks] + growth,
            chunks=[(tenant.slot, length) for tenant, length in chunks],
            skips=skips,
            rows=made,
        )
        self.drops, self.new = [], []
        self.out.append(plan)
        return plan

    def grow(self, tenant: Tenant, growth: list[tuple[int, int]]) -> None:
        blocks = self.take(self.wanted(tenant))
        tenant.blocks += blocks
        growth += [(tenant.slot, block) for block in blocks]

    def grow_by_rank(self, rows: list[Tenant], growth: list[tuple[int, int]]) -> list[Tenant]:
        served = [tenant for tenant in rows if not self.wanted(tenant)]
        for tenant in sorted(rows, key=lambda each: each.rank):
            wanted = self.wanted(tenant)
            if not wanted:
                continue
            while not tenant.gone and wanted > self.free and not tenant.under_way:
                self.preempt(max(self.tenants.values(), key=lambda each: each.rank))
            if not tenant.gone and wanted <= self.free:
                self.grow(tenant, growth)
                served.append(tenant)
        return [tenant for tenant in rows if tenant in served and not tenant.gone]

    def preempt(self, tenant: Tenant) -> None:
        self.release(tenant)
        self.preemptions += 1
        if tenant.last_step > self.last_done:
            self.settling.append(tenant)
        else:
            self.requeued.append(tenant.sequence)

    def plan_chunks(self, decodes: int) -> list[tuple[Tenant, int]]:
        waiting = sorted((each for each in self.tenants.values() if each.planned < each.target), key=lambda e: e.rank)
        budget = min(self.shape.max_tokens_per_step - decodes, self.pace.bound(decodes))
        longest = self.policy.long_prefill_threshold
        chunks = []
        for tenant in waiting:
            length = min(tenant.target - tenant.planned, budget)
            if longest and (decodes or len(waiting) > 1):
                length = min(length, longest)
            if length:
                tenant.planned += length
                budget -= length
                chunks.append((tenant, length))
        return chunks

    # --------------------------------------------------------------------------------------------------- step done

    def step_done(self, returned: list[list[int]], statuses: list[RowStatus], step_us: int) -> PlainOutcome:
        """``returned`` and ``statuses`` by row."""
        plan, outcome = self.out.pop(0), PlainOutcome()
        self.last_done = plan.step
        results = list(zip(plan.rows, returned, statuses, strict=True))
        for row, _, status in results:
            row.tenant.under_way -= row.samples
            if row.is_chunk and not row.tenant.gone and status is RowStatus.OK:
                row.tenant.computed += row.length
                self.register(row.tenant)
                for name in self.chain(row.tenant.sequence, row.tenant.certain // self.shape.block_size):
                    self.wrote(name, row.tenant)
        for row, ids, _ in results:
            if ids and not row.tenant.gone:
                self.take_ids(row.tenant, ids, outcome)
        for row, _, status in results:
            if status is not RowStatus.OK and not row.tenant.gone:
                self.end(row.tenant, failure(status), -1, outcome)
        for tenant in list(self.settling):
            self.take_late_row(tenant, results, outcome)
        settled = [tenant for tenant in self.settling if tenant.last_step <= self.last_done]
        self.settling = [tenant for tenant in self.settling if tenant not in settled]
        self.requeued += [tenant.sequence for tenant in settled]
        chunks = sum(row.length for row in plan.rows if row.is_chunk)
        self.pace.step_took(step_us, sum(not row.is_chunk for row in plan.rows), chunks)
        return outcome

    def append(self, tenant: Tenant, ids: list[int], outcome: PlainOutcome) -> tuple[FinishReason | None, int]:
        """As far as ids count; why and at which stop id the sequence ends, if it does."""
        request, first, taken, reason, stop = tenant.sequence.request, tenant.outputs, [], None, -1
        for token in ids:
            if tenant.outputs >= request.limit:
                break
            tenant.tokens.append(token)
            taken.append(token)
            if token in request.stops and tenant.outputs > request.sampling.min_tokens:
                reason, stop = FinishReason.STOP, token
                break
        if taken:
            outcome.delivered.append((tenant.sequence.rid, first, taken))
        if reason is None and tenant.outputs >= request.limit:
            reason = FinishReason.LENGTH
        return reason, stop

    def take_ids(self, tenant: Tenant, ids: list[int], outcome: PlainOutcome) -> None:
        reason, stop = self.append(tenant, ids, outcome)
        if reason is not None:
            self.end(tenant, reason, stop, outcome)

    def take_late_row(
        self, tenant: Tenant, results: list[tuple[Row, list[int], RowStatus]], outcome: PlainOutcome
    ) -> None:
        for row, ids, status in results:
            if row.tenant is not tenant:
                continue
            reason, stop = self.append(tenant, ids, outcome)
            self.keep_output(tenant)
            if reason is None and status is not RowStatus.OK:
                reason = failure(status)
            if reason is not None:
                self.settling.remove(tenant)
                outcome.finished.append((tenant.sequence.rid, reason, tenant.outputs, stop))

    def end(self, tenant: Tenant, reason: FinishReason, stop: int, outcome: PlainOutcome) -> None:
        self.release(tenant)
        outcome.finished.append((tenant.sequence.rid, reason, tenant.outputs, stop))

    def abort(self, sequence: Sequence) -> None:
        for tenant in list(self.tenants.values()):
            if tenant.sequence is sequence:
                self.release(tenant)
        self.settling = [tenant for tenant in self.settling if tenant.sequence is not sequence]

    def release(self, tenant: Tenant) -> None:
        tenant.gone = True
        self.keep_output(tenant)
        self.register(tenant)
        for name in list(self.writers):
            self.wrote(name, tenant)
        self.give_back(tenant.blocks)
        del self.tenants[tenant.slot]
        if tenant in self.new:
            self.new.remove(tenant)
        else:
            self.drops.append(tenant.slot)
        self.slot_order.append(tenant.slot)

    def keep_output(self, tenant: Tenant) -> None:
        tenant.sequence.output = np.array(tenant.tokens[tenant.prompt_len :], dtype=np.int32)

    def wrote(self, name: bytes, tenant: Tenant) -> None:
        if self.writers.get(name) is tenant:
            del self.writers[name]
