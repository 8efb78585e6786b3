"""A plan means one thing, and a plan that contradicts the tables is refused whole."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.packing import pack_u32
from protocol.requests import Sampling
from protocol.worker import Plan, SlotAdd
from workers.slots import PlanError, PoolShape, SlotTable, StepBatch

SHAPE = PoolShape(
    num_blocks=32, block_size=4, max_slots=4, max_tokens_per_step=16, max_ids_per_row=1, vocab_size=100, context=40
)


def add(slot: int, tokens: list[int], **fields: int) -> SlotAdd:
    return SlotAdd(slot, pack_u32(tokens), fields.pop("prompt_len", len(tokens)), 1, Sampling(), **fields)


def plan(
    adds: tuple[SlotAdd, ...] = (),
    blocks: tuple[tuple[int, int], ...] = (),
    chunks: tuple[tuple[int, int], ...] = (),
    drops: tuple[int, ...] = (),
    skips: tuple[int, ...] = (),
) -> Plan:
    def flat(pairs: tuple[tuple[int, int], ...]) -> bytes:
        return pack_u32([value for pair in pairs for value in pair])

    return Plan(1, 1, 1, pack_u32(drops), adds, flat(blocks), flat(chunks), pack_u32(skips))


def run(table: SlotTable, message: Plan, ids: int = 7) -> StepBatch:
    """Apply a plan and commit one id per sampling row."""
    batch = table.apply(message)
    counts = batch.samples.astype(np.uint8)
    table.commit(batch, counts, np.full(counts.sum(), ids, dtype=np.int32), np.ones(len(counts), dtype=np.bool_))
    return batch


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(SHAPE)


def test_a_whole_prompt_prefills_samples_and_then_decodes_by_itself(table) -> None:
    first = run(table, plan((add(2, [1, 2, 3, 4, 5]),), ((2, 8), (2, 9)), ((2, 5),)))
    assert (first.slots.tolist(), first.starts.tolist(), first.lengths.tolist()) == ([2], [0], [5])
    assert first.samples.tolist() == [True] and first.num_decodes == 0 and first.added.tolist() == [2]
    assert table.sequence(2).tolist() == [1, 2, 3, 4, 5, 7]
    assert table.block_table(2).tolist() == [8, 9]

    second = run(table, plan())
    assert (second.slots.tolist(), second.starts.tolist(), second.lengths.tolist()) == ([2], [5], [1])
    assert second.context_lengths.tolist() == [6] and second.num_decodes == 1
    assert table.sequence(2).tolist() == [1, 2, 3, 4, 5, 7, 7]


def test_only_the_chunk_that_reaches_the_end_samples(table) -> None:
    first = run(table, plan((add(0, [1, 2, 3, 4, 5]),), ((0, 0),), ((0, 3),)))
    assert first.samples.tolist() == [False]
    second = run(table, plan(blocks=((0, 1),), chunks=((0, 2),)))
    assert (second.starts.tolist(), second.samples.tolist()) == ([3], [True])


def test_a_slot_between_its_chunks_sits_out(table) -> None:
    run(table, plan((add(0, [1, 2, 3]),), ((0, 0),), ((0, 2),)))
    assert run(table, plan()).slots.size == 0


def test_decodes_come_first_by_slot_and_chunks_as_given(table) -> None:
    run(table, plan((add(3, [1]), add(1, [1])), ((3, 0), (1, 1)), ((3, 1), (1, 1))))
    batch = run(table, plan((add(2, [1, 2]), add(0, [1, 2])), ((2, 2), (0, 3)), ((2, 2), (0, 1))))
    assert batch.slots.tolist() == [1, 3, 2, 0] and batch.num_decodes == 2
    assert batch.samples.tolist() == [True, True, True, False]


def test_a_skip_of_a_slot_whose_last_chunk_was_not_ready_is_void(table) -> None:
    run(table, plan((add(0, [1]), add(1, [1, 2])), ((0, 0), (1, 1)), ((0, 1), (1, 1))))
    assert run(table, plan(skips=(1,))).slots.tolist() == [0]


def test_a_skipped_slot_keeps_its_place(table) -> None:
    run(table, plan((add(0, [1]), add(1, [1])), ((0, 0), (1, 1)), ((0, 1), (1, 1))))
    assert run(table, plan(skips=(0,))).slots.tolist() == [1]
    assert run(table, plan()).slots.tolist() == [0, 1]
    assert table.length[:2].tolist() == [3, 4]


def test_a_slot_dropped_and_filled_in_one_plan_starts_afresh(table) -> None:
    run(table, plan((add(0, [1, 2, 3, 4, 5]),), ((0, 0), (0, 1)), ((0, 5),)))
    batch = run(table, plan((add(0, [9]),), ((0, 5),), ((0, 1),), drops=(0,)))
    assert batch.dropped.tolist() == [0] and batch.added.tolist() == [0]
    assert table.sequence(0).tolist() == [9, 7] and table.block_table(0).tolist() == [5]


def test_a_resumed_sequence_prefills_its_output_and_keeps_its_prompt_length(table) -> None:
    run(table, plan((add(0, [1, 2, 3, 4], prompt_len=2),), ((0, 0), (0, 1)), ((0, 4),)))
    assert table.prompt_len[0] == 2 and table.length[0] == 5


def test_cached_tokens_are_not_prefilled_again(table) -> None:
    batch = run(table, plan((add(0, [1, 2, 3, 4, 5, 6], computed=4),), ((0, 0), (0, 1)), ((0, 2),)))
    assert (batch.starts.tolist(), batch.samples.tolist()) == ([4], [True])


def test_a_row_that_did_not_advance_is_offered_again_at_the_same_place(table) -> None:
    batch = table.apply(plan((add(0, [1, 2]),), ((0, 0),), ((0, 2),)))
    table.commit(batch, np.zeros(1, np.uint8), np.zeros(0, np.int32), np.zeros(1, np.bool_))
    again = run(table, plan(chunks=((0, 2),)))
    assert again.starts.tolist() == [0] and again.samples.tolist() == [True]


def test_rows_may_return_several_ids() -> None:
    shape = PoolShape(32, 4, 4, 16, 8, 100, 40)
    table = SlotTable(shape)
    batch = table.apply(plan((add(0, [1, 2]), add(1, [1])), ((0, 0), (0, 1), (0, 2), (1, 3), (1, 4)), ((0, 2), (1, 1))))
    ids = np.array([10, 11, 12, 20], dtype=np.int32)
    table.commit(batch, np.array([3, 1], np.uint8), ids, np.ones(2, np.bool_))
    assert table.sequence(0).tolist() == [1, 2, 10, 11, 12] and table.sequence(1).tolist() == [1, 20]
    assert table.computed[:2].tolist() == [4, 1], "the last id's KV is written by the next step"


def test_reset_empties_every_slot(table) -> None:
    run(table, plan((add(0, [1]),), ((0, 0),), ((0, 1),)))
    table.reset()
    assert run(table, plan()).slots.size == 0
    run(table, plan((add(0, [1]),), ((0, 0),), ((0, 1),)))


RUNNING = plan((add(0, [1]), add(1, [1, 2])), ((0, 0), (1, 1)), ((0, 1), (1, 1)))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (plan(drops=(2,)), "empty"),
        (plan(drops=(0, 0)), "named twice"),
        (plan(drops=(4,)), "beyond"),
        (plan((add(0, [1]),)), "occupied"),
        (plan((add(4, [1]),)), "beyond"),
        (plan((add(2, []),)), "0 tokens"),
        (plan((add(2, [1] * 41),)), "context"),
        (plan((add(2, [100]),)), "vocabulary"),
        (plan((add(2, [1, 2], prompt_len=3),)), "prompt_len"),
        (plan((add(2, [1, 2], computed=2),)), "computed"),
        (plan(blocks=((0, 32),)), "outside the pool"),
        (plan(blocks=((3, 1),)), "empty slot"),
        (plan(chunks=((1, 2),)), "beyond the end"),
        (plan(chunks=((1, 0),)), "empty"),
        (plan(chunks=((0, 1),)), "beyond the end"),
        (plan(chunks=((3, 1),)), "empty"),
        (plan(skips=(3,)), "empty"),
        (plan(skips=(4,)), "beyond"),
        (plan((add(2, [1] * 20),), tuple((2, b) for b in range(5, 10)), ((2, 17),)), "at most 16"),
        (plan((add(2, [1] * 5),), ((2, 5),), ((2, 5),)), "no block"),
        (Plan(1, 1, 1, drops=b"\0"), "whole number"),
        (Plan(1, 1, 1, blocks=b"\0" * 4), "whole number"),
    ],
)
def test_a_plan_that_contradicts_the_tables_is_refused(table, message: Plan, why: str) -> None:
    run(table, RUNNING)
    with pytest.raises(PlanError, match=why):
        table.apply(message)


def test_a_decode_without_a_block_for_its_next_position_is_refused(table) -> None:
    run(table, plan((add(0, [1, 2, 3, 4]),), ((0, 0),), ((0, 4),)))
    with pytest.raises(PlanError, match="no block"):
        table.apply(plan())
