"""A worker leader without an engine: real tables, made-up ids, and a KV cache that remembers who wrote what.

Every plan goes through the worker's own ``SlotTable``, so a plan that a real worker would refuse fails the test. The
ids of a request are a pure function of (prompt, seed, index).
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from hashlib import blake2b, shake_128

import numpy as np

from protocol.logprobs import prompt_records_of_chunk, record_size
from protocol.packing import pack_u8, pack_u32
from protocol.worker import Plan, Register, Reset, RowStatus, SchedulerToLeader, StepDone, StepFailed, Stop
from workers.slots import PoolShape, SlotParameters, SlotTable, StepBatch

VOCAB = 97


def id_at(prompt: bytes, seed: int, index: int) -> int:
    """The output id at an index: what any group, however often interrupted, must come to."""
    digest = blake2b(prompt + seed.to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def record_at(prompt: bytes, seed: int, position: int, alternatives: int) -> bytes:
    """The logprob record of the token at a position, prompt included: noise of the right size, nothing when unasked."""
    if alternatives < 0:
        return b""
    content = prompt + seed.to_bytes(8, "little") + position.to_bytes(4, "little")
    return shake_128(content).digest(record_size(alternatives))


def register(group: str = "g0", incarnation: int = 1, model: str = "m", **shape: int) -> Register:
    """A registration with a roomy shape, unless told otherwise."""
    sizes = {
        "num_blocks": 64,
        "block_size": 4,
        "max_slots": 8,
        "max_tokens_per_step": 32,
        "max_ids_per_row": 1,
        "vocab_size": VOCAB,
        "context": 64,
        **shape,
    }
    return Register(
        nonce=1,
        oldest_version=1,
        newest_version=1,
        group=group,
        incarnation=incarnation,
        model=model,
        tp=1,
        numerics_digest=b"n" * 16,
        tokenizer_digest=b"t" * 16,
        **sizes,
    )


class FakeWorker:
    """Executes plans one at a time, when told to."""

    def __init__(self, registration: Register, rng: random.Random | None = None) -> None:
        self.registration = registration
        self.table = SlotTable(
            PoolShape(
                num_blocks=registration.num_blocks,
                block_size=registration.block_size,
                max_slots=registration.max_slots,
                max_tokens_per_step=registration.max_tokens_per_step,
                max_ids_per_row=registration.max_ids_per_row,
                vocab_size=registration.vocab_size,
                context=registration.context,
            )
        )
        self.plans: deque[Plan] = deque()
        self.executed: list[tuple[Plan, StepBatch]] = []
        self.resets = 0
        self._rng = rng or random.Random(0)
        self._epoch = 0
        self._next_step: int | None = None
        self._stood_still = False
        """A row was not ready once: a plan already under way may come to nothing."""
        self._spoiled: set[int] = set()
        """Slots whose row failed: what they compute until they are dropped goes nowhere."""
        self._kv = np.full(registration.num_blocks * registration.block_size, -1, dtype=np.int64)

    def receive(self, message: SchedulerToLeader) -> None:
        """A message of the scheduler: Reset at once, plans when ``step`` is called."""
        if isinstance(message, Reset):
            self._epoch, self._next_step = message.epoch, message.first_step
            self.resets += 1
            self.plans.clear()
            self.table.reset()
        elif isinstance(message, Stop):
            self.plans.clear()
        else:
            assert isinstance(message, Plan), message
            self.plans.append(message)

    def step(self, statuses: Callable[[StepBatch], dict[int, RowStatus]] = lambda batch: {}) -> StepDone:
        """Execute the oldest plan; ``statuses`` names rows that fail."""
        plan = self.plans.popleft()
        assert (plan.epoch, plan.step) == (self._epoch, self._next_step), "plans come in order"
        assert plan.incarnation == self.registration.incarnation
        self._next_step = plan.step + 1
        batch = self.table.apply(plan)
        assert len(batch.slots) or self._stood_still, "an empty plan was sent"
        self._spoiled -= set(batch.added.tolist())
        self._check_what_is_written_is_not_shared(batch)
        self._check_additions(batch)
        failures = statuses(batch)
        status = np.array([failures.get(row, RowStatus.OK) for row in range(len(batch.slots))], dtype=np.uint8)
        counts = np.array([self._count(batch, row) if status[row] == 0 else 0 for row in range(len(status))], np.uint8)
        ids = [self._id(int(batch.slots[row]), n) for row in range(len(counts)) for n in range(int(counts[row]))]
        self._write_and_read_kv(batch, counts, ids, status)
        logprobs = self._logprobs(batch, counts)
        prompt_logprobs = self._prompt_logprobs(batch, status)
        self._stood_still |= (status == RowStatus.NOT_READY).any()
        self._spoiled |= set(batch.slots[(status != RowStatus.OK) & (status != RowStatus.NOT_READY)].tolist())
        advanced = status != RowStatus.NOT_READY
        advanced[: batch.num_decodes] &= status[: batch.num_decodes] == RowStatus.OK
        self.table.commit(batch, counts, np.array(ids, dtype=np.int32), advanced)
        self.executed.append((plan, batch))
        return StepDone(
            plan.epoch,
            plan.incarnation,
            plan.step,
            pack_u8(counts),
            pack_u32(ids),
            pack_u8(status),
            1000,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def fail(self, kind: str = "engine", *, kv_survived: bool = True) -> StepFailed:
        """Refuse the oldest plan and everything after it, until Reset."""
        plan = self.plans.popleft()
        if not kv_survived:
            self._kv[:] = -1
        self._next_step = None
        self.plans.clear()
        return StepFailed(plan.epoch, plan.incarnation, plan.step, kind, kv_survived=kv_survived)

    def _count(self, batch: StepBatch, row: int) -> int:
        return self._rng.randint(1, self.table.shape.max_ids_per_row) if batch.samples[row] else 0

    def _id(self, slot: int, ahead: int) -> int:
        prompt, parameters = self._prompt(slot)
        return id_at(prompt, parameters.seed, int(self.table.length[slot]) - len(prompt) // 4 + ahead)

    def _prompt(self, slot: int) -> tuple[bytes, SlotParameters]:
        parameters = self.table.parameters[slot]
        assert parameters is not None
        return self.table.tokens[slot, : self.table.prompt_len[slot]].astype("<u4").tobytes(), parameters

    def _logprobs(self, batch: StepBatch, counts: np.ndarray) -> bytes:
        records = []
        for row, slot in enumerate(batch.slots.tolist()):
            prompt, parameters = self._prompt(slot)
            length = int(self.table.length[slot])
            for ahead in range(int(counts[row])):
                records.append(record_at(prompt, parameters.seed, length + ahead, parameters.sampling.logprobs))
        return b"".join(records)

    def _prompt_logprobs(self, batch: StepBatch, status: np.ndarray) -> bytes:
        records = []
        for row in range(batch.num_decodes, len(batch.slots)):
            prompt, parameters = self._prompt(int(batch.slots[row]))
            start = int(batch.starts[row])
            judged = prompt_records_of_chunk(start, int(batch.lengths[row]), len(prompt) // 4)
            for position in range(start + 1, start + 1 + judged) if status[row] == RowStatus.OK else ():
                records.append(record_at(prompt, parameters.seed, position, parameters.sampling.prompt_logprobs))
        return b"".join(records)

    def _check_additions(self, batch: StepBatch) -> None:
        """A sequence that comes back brings exactly the ids it had produced."""
        for slot in batch.added:
            prompt_len, length = int(self.table.prompt_len[slot]), int(self.table.length[slot])
            prompt, parameters = self._prompt(int(slot))
            expected = [id_at(prompt, parameters.seed, index) for index in range(length - prompt_len)]
            assert self.table.tokens[slot, prompt_len:length].tolist() == expected, "output lost or doubled"

    def _check_what_is_written_is_not_shared(self, batch: StepBatch) -> None:
        """Sequences may read one block; what a step writes to is its own."""
        owners: Counter[int] = Counter()
        for slot in np.flatnonzero(self.table.occupied):
            owners.update(self.table.block_table(slot).tolist())
        for row, slot in enumerate(batch.slots):
            first = int(batch.starts[row]) // self.table.shape.block_size
            shared = [block for block in self.table.block_table(slot)[first:].tolist() if owners[block] > 1]
            assert not shared, f"slot {slot} writes to {shared}, which others hold too"

    def _write_and_read_kv(self, batch: StepBatch, counts: np.ndarray, ids: list[int], status: np.ndarray) -> None:
        """Write what the step computes, then read every position that it attends to."""
        size, at = self.table.shape.block_size, 0
        for row, slot in enumerate(batch.slots):
            returned = ids[at : at + int(counts[row])]
            at += int(counts[row])
            if status[row] or slot in self._spoiled:
                continue
            sequence = [*self.table.sequence(slot).tolist(), *returned]
            start, written = int(batch.starts[row]), int(batch.lengths[row]) + max(len(returned) - 1, 0)
            blocks = self.table.block_table(slot)
            for position in range(start + written):
                cell = int(blocks[position // size]) * size + position % size
                # A token means the same K and V only after the same prefix.
                content = hash((position, *sequence[: position + 1]))
                if position >= start:
                    self._kv[cell] = content
                assert self._kv[cell] == content, f"slot {slot}: position {position} holds someone else's KV"
