"""A scripted engine's output is a function of its script and the output index, whatever happens around it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.packing import pack_u32
from protocol.worker import Plan, RowStatus
from tests.workers.hand_driven import slot_add
from workers.engine import EngineDescription, EngineFault
from workers.script import Fault, Match, ScriptEntry, ScriptError, ScriptLine, load_script
from workers.scripted import FaultActions, ScriptedEngine
from workers.slots import PoolShape, SlotTable

END = 257
SHAPE = PoolShape(
    num_blocks=64,
    block_size=16,
    max_slots=4,
    max_tokens_per_step=512,
    max_ids_per_row=8,
    vocab_size=260,
    context=256,
)


def entry(text: str = "", **fields: object) -> ScriptEntry:
    line = ScriptLine(text=text, **fields)  # type: ignore[arg-type]
    return ScriptEntry(line, list(text.encode()), END)


class Harness:
    """An engine with its tables, driven without a leader."""

    def __init__(self, *entries: ScriptEntry, faults: FaultActions | None = None) -> None:
        self.slept: list[float] = []
        self.engine = ScriptedEngine(
            EngineDescription(SHAPE, b"", b"", "scripted"),
            (*entries, entry("default")),
            lambda ids: bytes(ids).decode(errors="replace"),
            faults=faults,
            sleep=self.slept.append,
        )
        self.table = SlotTable(SHAPE)
        self.output: dict[int, list[int]] = {}

    def step(self, *, adds=(), drops=(), chunks=()) -> list[int]:
        """One plan; returns the rows' statuses. Every added slot gets all the blocks it could need."""
        blocks = [(add.slot, add.slot * 16 + index) for add in adds for index in range(16)]
        plan = Plan(
            1,
            1,
            1,
            drops=pack_u32(drops),
            adds=tuple(adds),
            blocks=pack_u32([item for pair in blocks for item in pair]),
            chunks=pack_u32([item for pair in chunks for item in pair]),
        )
        batch = self.table.apply(plan)
        results = self.engine.execute(batch, self.table)
        ends = np.cumsum(results.counts)
        for row, slot in enumerate(batch.slots):
            ids = results.ids[ends[row] - results.counts[row] : ends[row]].tolist()
            self.output.setdefault(int(slot), []).extend(ids)
        self.table.commit(batch, results.counts, results.ids, results.status == RowStatus.OK)
        return results.status.tolist()

    def run(self, prompt: str, *, slot: int = 0, seed: int = 1, resume: list[int] = [], ids: int = 8) -> list[int]:  # noqa: B006
        """One sequence alone until it has at least this many ids; then it is dropped."""
        tokens = [*prompt.encode(), *resume]
        self.output[slot] = []
        self.step(adds=[slot_add(slot, tokens, len(prompt), seed)], chunks=[(slot, len(tokens))])
        while len(self.output[slot]) < ids:
            self.step()
        self.step(drops=[slot])
        return self.output[slot]


def text(ids: list[int]) -> str:
    return bytes(i for i in ids if i < 256).decode()


def test_a_script_ends_in_end_tokens() -> None:
    assert Harness(entry("hi")).run("x", ids=4) == [ord("h"), ord("i"), END, END]


def test_the_first_line_that_matches_wins() -> None:
    harness = Harness(
        entry("second", match=Match(nth=2)),
        entry("sea", match=Match(prompt_contains="sea")),
        entry("both", match=Match(prompt_contains="sea", nth=3)),
    )
    assert text(harness.run("the sea", seed=1)[:3]) == "sea"
    assert text(harness.run("the sea", seed=2)[:6]) == "second"
    assert text(harness.run("the sea", seed=3)[:3]) == "sea"
    assert text(harness.run("the land", seed=4)[:7]) == "default"


@given(
    text_length=st.integers(0, 20),
    step_sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    cut=st.integers(0, 12),  # so that mates, eight ids a step, stay within their blocks while the chunks run
    chunk=st.integers(1, 10),
    mates=st.integers(0, 3),
)
@example(text_length=0, step_sizes=[8], cut=12, chunk=1, mates=3)
def test_output_does_not_depend_on_chunks_batch_or_resume(text_length, step_sizes, cut, chunk, mates) -> None:
    answer = entry("abcdefghijklmnopqrst"[:text_length], step_sizes=step_sizes)
    expected = [answer.id_at(index) for index in range(40)]
    assert Harness(answer).run("a prompt", ids=30)[:30] == expected[:30]

    harness = Harness(answer)
    prompt = list(b"a prompt")
    tokens = [*prompt, *expected[:cut]]
    others = [slot_add(slot, b"mate") for slot in range(1, 1 + mates)]
    harness.step(
        adds=[slot_add(0, tokens, len(prompt)), *others],
        chunks=[(0, min(chunk, len(tokens))), *((add.slot, 4) for add in others)],
    )
    done = min(chunk, len(tokens))
    while done < len(tokens):
        size = min(chunk, len(tokens) - done)
        harness.step(chunks=[(0, size)])
        done += size
    while cut + len(harness.output[0]) < 30:
        harness.step()
    assert harness.output[0] == expected[cut : cut + len(harness.output[0])]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.integers(0, 50), st.integers(0, 50))
def test_steps_end_at_the_same_places_wherever_they_start(step_sizes, start, further) -> None:
    answer = entry("x", step_sizes=step_sizes)
    ends = set()
    index = 0
    while index < 200:
        index += answer.take(index)
        ends.add(index)
    assert start + answer.take(start) in ends
    assert 1 <= answer.take(start + further) <= 8


def test_a_sequence_that_comes_back_keeps_its_number() -> None:
    harness = Harness(entry("one", match=Match(nth=1)), entry("two", match=Match(nth=2)))
    assert text(harness.run("a", seed=1, ids=3)) == "one"
    assert text(harness.run("b", seed=2, ids=3)) == "two"
    assert text(harness.run("a", seed=1, resume=list(b"on"), ids=1)) == "e", "resumed"
    harness.step(adds=[slot_add(0, b"c", seed=3)], chunks=[])
    harness.step(drops=[0])
    harness.step(adds=[slot_add(0, b"c", seed=3)], chunks=[(0, 1)])
    harness.step(drops=[0])
    assert text(harness.run("d", seed=4, ids=7)) == "default"


def test_a_step_takes_the_longest_delay_of_its_rows() -> None:
    harness = Harness(entry("a", match=Match(prompt_contains="slow"), delay_ms=50), entry("b", delay_ms=20))
    harness.step(adds=[slot_add(0, b"slow"), slot_add(1, b"fast")], chunks=[(0, 4), (1, 4)])
    harness.step(drops=[0])
    harness.step(drops=[1])
    assert harness.slept == [0.05, 0.02, 0.0]


class Exited(Exception):
    pass


class Hung(Exception):
    pass


def raising(error: type[Exception]):
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(("kind", "error"), [("exit", Exited), ("hang", Hung), ("step_failed", EngineFault)])
@pytest.mark.parametrize("step_sizes", [[1], [8], [2, 1]])
def test_a_fault_comes_exactly_at_its_index(kind, error, step_sizes) -> None:
    answer = entry("abcdef", step_sizes=step_sizes, fault=Fault(at_index=3, kind=kind))
    harness = Harness(answer, faults=FaultActions(exit=raising(Exited), hang=raising(Hung)))
    with pytest.raises(error):
        harness.run("x", ids=6)
    assert text(harness.output[0]) == "abc", "the ids before it were returned"
    with pytest.raises(error):
        harness.engine.reset()
        harness.table.reset()
        harness.run("x", resume=list(b"abc"))
    harness.engine.reset()
    harness.table.reset()
    assert text(harness.run("x", resume=list(b"abcd"), ids=2)) == "ef"


def test_a_fault_for_fresh_sequences_spares_resumed_ones() -> None:
    answer = entry("abcdef", fault=Fault(at_index=3, kind="exit", fresh_only=True))
    harness = Harness(answer, faults=FaultActions(exit=raising(Exited)))
    assert text(harness.run("x", resume=list(b"abc"), ids=3)) == "def"


def test_a_nan_fails_its_row_alone() -> None:
    harness = Harness(
        entry("abc", match=Match(prompt_contains="bad"), fault=Fault(at_index=0, kind="nan")), entry("xyz")
    )
    status = harness.step(adds=[slot_add(0, b"bad"), slot_add(1, b"good")], chunks=[(0, 3), (1, 4)])
    assert status == [RowStatus.NAN, RowStatus.OK]
    assert (harness.output[0], text(harness.output[1])) == ([], "x")


def load(path: Path | str) -> tuple[ScriptEntry, ...]:
    return load_script(str(path), encode=lambda text: list(text.encode()), vocab_size=260, end_id=END)


def test_stop_ids_are_not_returned_before_min_tokens() -> None:
    answer = entry("abXc", step_sizes=[8])
    assert text(answer.ids_from(0, 7, (ord("X"), END))) == "abccbca"
    assert answer.ids_from(0, 7, (ord("X"), END))[7] == END
    assert entry("").ids_from(0, 2, (0, 1, END)) == [2]
    assert answer.ids_from(0, 0, (ord("X"), END))[:5] == [*b"abXc", END]


def test_a_script_file_is_read_line_by_line(tmp_path) -> None:
    path = tmp_path / "script.jsonl"
    lines = [
        {"match": {"prompt_contains": "a"}, "text": "answer", "step_sizes": [3], "delay_ms": 1.5, "fault": None},
        {"match": {"nth": 2}, "ids": [1, 2, 259], "fault": {"at_index": 2, "kind": "hang"}},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    first, second, default = load(path)
    assert [first.id_at(index) for index in range(7)] == [*b"answer", END]
    assert (first.take(0), first.delay_seconds) == (3, 0.0015)
    assert second.fault == Fault(at_index=2, kind="hang")
    assert second.ids_from(0) == [1] and default.match == Match()


def test_without_a_script_there_is_an_answer() -> None:
    (default,) = load("")
    assert text([default.id_at(index) for index in range(60)]).startswith("This is a scripted answer.")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("nonsense", "malformed"),
        ("{}", 'either "ids" or "text"'),
        ('{"ids": [1], "text": "a"}', 'either "ids" or "text"'),
        ('{"ids": [260]}', "id 260 is outside the vocabulary of 260"),
        ('{"ids": [-1]}', ">= 0"),
        ('{"text": "a", "step_sizes": []}', '"step_sizes" must not be empty'),
        ('{"text": "a", "step_sizes": [9]}', "<= 8"),
        ('{"text": "a", "fault": {"at_index": 1, "kind": "explode"}}', "explode"),
        ('{"text": "a", "delay": 1}', "unknown field `delay`"),
        ('{"match": {"nth": 0}, "text": "a"}', ">= 1"),
        ("[" * 5000, "Expected `object`"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path, line, complaint) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ScriptError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert complaint in str(caught.value)


def test_a_missing_script_is_named(tmp_path) -> None:
    with pytest.raises(ScriptError, match="cannot read the engine script"):
        load(tmp_path / "absent")
