"""Engine scripts: JSON lines that say what a scripted engine answers.

A line is ``{"match": …, "ids": [int] | "text": str, "step_sizes": [int], "delay_ms": number, "fault": null | {…}}``;
the first line that matches a sequence wins. What a sequence outputs is a pure function of its line and of the output
index, so that batching, chunking, preemption and resume cannot change it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from protocol.requests import MAX_IDS_PER_ROW

DEFAULT_TEXT = "This is a scripted answer. It is the same every time."


class ScriptError(ValueError):
    """A script that cannot be used; the message names file and line."""


class Match(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which sequences a line answers; with no field set, every one."""

    prompt_contains: str | None = None
    """Text within the decoded prompt, special tokens included."""
    nth: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """1 is the first sequence this engine was given, 2 the second; one that comes back after a preemption or a
    resume keeps its number."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong instead of the output id at ``at_index``; ids before it are returned."""

    at_index: Annotated[int, msgspec.Meta(ge=0)]
    kind: Literal["exit", "hang", "step_failed", "nan"]
    fresh_only: bool = False
    """True: sequences that were added with output (resumed or preempted ones) are spared."""


class ScriptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line as written."""

    match: Match = Match()
    ids: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None
    text: str | None = None
    step_sizes: list[Annotated[int, msgspec.Meta(ge=1, le=MAX_IDS_PER_ROW)]] = msgspec.field(
        default_factory=lambda: [1]
    )
    """Most ids a row returns in one step, cycled over."""
    delay_ms: Annotated[float, msgspec.Meta(ge=0, le=3_600_000)] = 0.0
    """A step takes at least the longest delay of its rows."""
    fault: Fault | None = None


class ScriptEntry:
    """One line, ready to answer."""

    def __init__(self, line: ScriptLine, ids: Sequence[int], end_id: int) -> None:
        self.match = line.match
        self.delay_seconds = line.delay_ms / 1000
        self.fault = line.fault
        self.step_sizes = tuple(line.step_sizes)
        self.logprob_key = int.from_bytes(blake2b(repr(list(ids)).encode(), digest_size=8).digest(), "little")
        """What this entry's logprobs come from, see workers/synthetic_logprobs.py."""
        self._ids = tuple(ids)
        self._end_id = end_id

    def id_at(self, index: int) -> int:
        """The output id at an index: the script's, then the end token for ever."""
        return self._ids[index] if index < len(self._ids) else self._end_id

    def unless_stop(self, index: int, stop_ids: Collection[int]) -> int:
        """The id at an index when stop ids must not be sampled: the script's other ids in turn, or the lowest id."""
        if self.id_at(index) not in stop_ids:
            return self.id_at(index)
        others = [i for i in self._ids if i not in stop_ids]
        if others:
            return others[index % len(others)]
        return next(i for i in range(len(stop_ids) + 1) if i not in stop_ids)

    def take(self, index: int) -> int:
        """How many ids a row returns whose next output index is this: up to the end of the current step size.

        ::

            step_sizes [1, 3]   | 0 | 1 2 3 | 4 | 5 6 7 | 8 …      take(2) = 2
        """
        within = index % sum(self.step_sizes)
        for size in self.step_sizes:
            if within < size:
                return size - within
            within -= size
        raise AssertionError("unreachable: within < sum(step_sizes)")

    def ids_from(self, index: int, min_tokens: int = 0, stop_ids: Collection[int] = ()) -> list[int]:
        """What one step returns, cut short before a fault's index; no stop ids before ``min_tokens``."""
        count = self.take(index)
        if self.fault is not None and index < self.fault.at_index < index + count:
            count = self.fault.at_index - index
        return [
            self.unless_stop(at, stop_ids) if at < min_tokens else self.id_at(at) for at in range(index, index + count)
        ]


def load_script(
    path: str, *, encode: Callable[[str], Sequence[int]], vocab_size: int, end_id: int
) -> tuple[ScriptEntry, ...]:
    """The entries of a file, or the default script when ``path`` is empty. Raises ScriptError.

    A last entry that matches everything is added, so that some entry always matches.
    """
    default = ScriptEntry(ScriptLine(text=DEFAULT_TEXT), encode(DEFAULT_TEXT), end_id)
    if not path:
        return (default,)
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ScriptError(f"cannot read the engine script {path}: {error.strerror}") from error
    entries = []
    for number, raw in enumerate(lines, start=1):
        if raw.strip():
            line = _parse(raw, f"{path}:{number}")
            ids = line.ids if line.ids is not None else encode(line.text or "")
            if ids and max(ids) >= vocab_size:
                raise ScriptError(f"{path}:{number}: id {max(ids)} is outside the vocabulary of {vocab_size}")
            entries.append(ScriptEntry(line, ids, end_id))
    return (*entries, default)


def _parse(raw: bytes, where: str) -> ScriptLine:
    try:
        line = msgspec.json.decode(raw, type=ScriptLine)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ScriptError(f"{where}: {error}") from error
    if (line.ids is None) == (line.text is None):
        raise ScriptError(f'{where}: give either "ids" or "text"')
    if not line.step_sizes:
        raise ScriptError(f'{where}: "step_sizes" must not be empty')
    return line
