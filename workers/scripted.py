"""An engine whose answers are written down: for tests of everything around a model.

It is driven by the same leader, plans and tables as the model engine and breaks where that would. It knows token ids
and, to match prompts, a tokenizer; nothing of tensors.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from protocol.worker import RowStatus
from workers.engine import EngineDescription, EngineFault, RowResults
from workers.options import WorkerOptions
from workers.script import Fault, ScriptEntry, load_script
from workers.slots import PoolShape, SlotTable, StepBatch
from workers.synthetic_logprobs import with_logprobs

if TYPE_CHECKING:
    from headrace.model_files.artefacts import Artefacts

EXIT_STATUS = 17
"""Of a process that a script's ``exit`` fault ended."""
KV_BYTES_PER_TOKEN = 23_040
"""As SmolLM2-135M in bfloat16, so that --kv-cache-memory gives the same pool: 30 layers, 3 KV heads of 64, K and V."""
DEFAULT_KV_BYTES = 512 << 20
REMEMBERED_SEQUENCES = 4096


@dataclass(frozen=True)
class FaultActions:
    """How faults that end or stop the process are carried out; tests put their own here."""

    exit: Callable[[], object] = lambda: os._exit(EXIT_STATUS)
    hang: Callable[[], object] = lambda: threading.Event().wait()


@dataclass
class _Sequence:
    entry: ScriptEntry
    number: int
    key: bytes
    fresh: bool
    produced: bool = False


class _Numbers:
    """Which number each sequence has: a sequence that comes back keeps the one it had."""

    def __init__(self) -> None:
        self._count = 0
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._dropped_unheard: set[bytes] = set()

    def arrive(self, key: bytes, fresh: bool) -> int:
        returning = not fresh or key in self._dropped_unheard
        self._dropped_unheard.discard(key)
        number = self._known.get(key) if returning else None
        if number is None:
            self._count += 1
            number = self._count
        self._known[key] = number
        self._known.move_to_end(key)
        if len(self._known) > REMEMBERED_SEQUENCES:
            self._dropped_unheard.discard(self._known.popitem(last=False)[0])
        return number

    def leave(self, sequence: _Sequence) -> None:
        """A sequence dropped before its first id was preempted, or aborted: if it comes again it is the same."""
        if sequence.fresh and not sequence.produced and sequence.key in self._known:
            self._dropped_unheard.add(sequence.key)


class ScriptedEngine:
    """Answers each sequence from the first script entry that matches it."""

    def __init__(
        self,
        description: EngineDescription,
        entries: tuple[ScriptEntry, ...],
        decode: Callable[[list[int]], str],
        *,
        faults: FaultActions | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._description = description
        self._entries = entries
        self._decode = decode
        self._faults = faults or FaultActions()
        self._sleep = sleep
        self._sequences: dict[int, _Sequence] = {}
        self._numbers = _Numbers()

    @property
    def description(self) -> EngineDescription:
        """What the group registers."""
        return self._description

    def execute(self, batch: StepBatch, table: SlotTable) -> RowResults:
        """One step: rows that sample return what their script says from their output index on."""
        for slot in batch.dropped:
            self._forget(int(slot))
        for slot in batch.added:
            self._sequences[int(slot)] = self._recognise(int(slot), table)
        rows = len(batch.slots)
        counts = np.zeros(rows, dtype=np.uint8)
        status = np.full(rows, RowStatus.OK, dtype=np.uint8)
        ids: list[int] = []
        details: dict[int, str] = {}
        self._sleep(max((self._sequences[int(slot)].entry.delay_seconds for slot in batch.slots), default=0.0))
        for row in np.flatnonzero(batch.samples):
            slot = int(batch.slots[row])
            sequence = self._sequences[slot]
            index = int(table.length[slot] - table.prompt_len[slot])
            if self._faulty(sequence, index):
                status[row] = RowStatus.NAN
                details[int(row)] = f"the script says nan at output index {index}"
                continue
            parameters = table.parameters[slot]
            assert parameters is not None, "an occupied slot has parameters"
            stop_ids = parameters.stop_ids.tolist()
            produced = sequence.entry.ids_from(index, parameters.sampling.min_tokens, stop_ids)
            sequence.produced = True
            counts[row] = len(produced)
            ids += produced
        results = RowResults(counts, np.array(ids, dtype=np.int32), status, details)
        return with_logprobs(results, batch, table, lambda slot: self._sequences[slot].entry.logprob_key)

    def reset(self) -> None:
        """Every slot was dropped."""
        for slot in list(self._sequences):
            self._forget(slot)

    def close(self) -> None:
        """Nothing is held."""

    def _forget(self, slot: int) -> None:
        sequence = self._sequences.pop(slot, None)
        if sequence is not None:
            self._numbers.leave(sequence)

    def _recognise(self, slot: int, table: SlotTable) -> _Sequence:
        parameters = table.parameters[slot]
        assert parameters is not None, "an added slot has parameters"
        prompt_len = int(table.prompt_len[slot])
        prompt = table.tokens[slot, :prompt_len]
        fresh = prompt_len == int(table.length[slot])
        key = blake2b(prompt.tobytes() + parameters.seed.to_bytes(8, "little"), digest_size=16).digest()
        number = self._numbers.arrive(key, fresh)
        text: str | None = None
        for entry in self._entries:
            if entry.match.nth is not None and entry.match.nth != number:
                continue
            if entry.match.prompt_contains is not None:
                text = self._decode(prompt.tolist()) if text is None else text
                if entry.match.prompt_contains not in text:
                    continue
            return _Sequence(entry, number, key, fresh)
        raise AssertionError("the last entry of a script matches everything")

    def _faulty(self, sequence: _Sequence, index: int) -> bool:
        """Carry out a fault that is due; True when the row itself is to fail."""
        fault: Fault | None = sequence.entry.fault
        if fault is None or index != fault.at_index or (fault.fresh_only and not sequence.fresh):
            return False
        if fault.kind == "exit":
            self._faults.exit()
        elif fault.kind == "hang":
            self._faults.hang()
        elif fault.kind == "step_failed":
            raise EngineFault("engine", f"the script says step_failed at output index {index}", kv_survived=True)
        return fault.kind == "nan"


def load_tokenizer_artefacts(options: WorkerOptions) -> Artefacts:
    """What a scripted or simulated engine speaks: the byte tokenizer or the model's. Raises ArtefactError."""
    from headrace.model_files.artefacts import byte_artefacts, load_artefacts

    if options.tokenizer == "byte":
        return byte_artefacts()
    return load_artefacts(options.model, revision=options.revision, download_dir=options.download_dir)


def fake_pool(options: WorkerOptions, artefacts: Artefacts, max_ids_per_row: int) -> PoolShape:
    """A pool of the size a small real model would have under the same options; no memory stands behind it."""
    kv_bytes = options.kv_cache_memory or DEFAULT_KV_BYTES
    return PoolShape(
        num_blocks=max(1, kv_bytes // (KV_BYTES_PER_TOKEN * options.block_size)),
        block_size=options.block_size,
        max_slots=options.max_num_seqs or 64,
        max_tokens_per_step=options.max_num_batched_tokens or 512,
        max_ids_per_row=max_ids_per_row,
        vocab_size=artefacts.vocab_size,
        context=min(artefacts.context, options.max_model_len or artefacts.context),
    )


def build_scripted_engine(options: WorkerOptions, artefacts: Artefacts) -> ScriptedEngine:
    """The engine of ``--engine scripted``. Raises ScriptError for a script that cannot be used."""
    tokenizer = artefacts.tokenizer()
    entries = load_script(
        options.engine_script,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        vocab_size=artefacts.vocab_size,
        end_id=artefacts.end_ids[0],
    )
    most_ids = max(size for entry in entries for size in entry.step_sizes)
    tokenizer_digest = artefacts.tokenizer_digest()
    description = EngineDescription(
        shape=fake_pool(options, artefacts, most_ids),
        numerics_digest=blake2b(b"scripted" + tokenizer_digest, digest_size=16).digest(),
        tokenizer_digest=tokenizer_digest,
        backend="scripted",
    )
    return ScriptedEngine(description, entries, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)))
