"""The sampler of the native library: the same draws as ``workers/sampler.py``, given the same logits."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.logprobs import record_size
from workers.backends.native_cpu.library import Float32Array, NativeLibrary, Team
from workers.logit_rules import LogitRules, has_rules, read_rules
from workers.sampling import Int64Array, Sampled
from workers.slots import BoolArray, Int32Array, SlotTable

_ROW = np.dtype(
    [
        ("seed", "u8"),
        ("position", "i8"),
        *((name, "u8") for name in ("tokens", "suppressed", "bias_ids", "biases", "allowed", "forbidden", "endings")),
        ("record", "i8"),
        *((name, "i4") for name in ("prompt_length", "suppressed_count", "bias_count", "allowed_count")),
        *((name, "i4") for name in ("forbidden_count", "endings_size", "alternatives", "top_k")),
        *((name, "f4") for name in ("temperature", "top_p", "floor", "presence", "frequency", "repetition")),
    ]
)
"""``headrace_sampling_row``: addresses are u8."""

_INT, _POINTER = ctypes.c_int32, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "sampler_create": (_INT, (_POINTER, _INT, _POINTER)),
    "sampler_destroy": (None, (_POINTER,)),
    "sample": (_INT, (_POINTER, _POINTER, _INT, *[_POINTER] * 4)),
    "token_records": (_INT, (_POINTER, _INT, *[_POINTER] * 6)),
}


class NativeSampler:
    """Draws one id per row, on the team's threads. The row of each slot is kept; a step fills in what moves."""

    def __init__(self, library: NativeLibrary, team: Team, max_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._functions = {}
        for name, (result, arguments) in _SIGNATURES.items():
            function = library.handle[f"headrace_{name}"]
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function
        self._slots = np.zeros(max_slots, dtype=_ROW)
        self._min_tokens = np.zeros(max_slots, dtype=np.int64)
        self._held: dict[int, tuple[npt.NDArray[Any], ...]] = {}  # what the addresses of a slot's row point to
        created = ctypes.c_void_p()
        self._checked(self._functions["sampler_create"](team.pointer, vocab_size, ctypes.byref(created)))
        self._sampler = created

    def add(self, slots: Int32Array, table: SlotTable) -> None:
        """Take over the parameters of slots that were just added."""
        for slot in slots.tolist():
            parameters = table.parameters[slot]
            assert parameters is not None, "an added slot has parameters"
            sampling, row = parameters.sampling, self._slots[slot]
            row["seed"], row["prompt_length"] = parameters.seed, table.prompt_len[slot]
            row["temperature"], row["top_p"], row["top_k"] = sampling.temperature, sampling.top_p, sampling.top_k
            with np.errstate(divide="ignore"):
                row["floor"] = np.log(np.float32(sampling.min_p))
            row["presence"], row["frequency"] = sampling.presence_penalty, sampling.frequency_penalty
            row["repetition"], row["alternatives"] = sampling.repetition_penalty, sampling.logprobs
            self._min_tokens[slot] = sampling.min_tokens
            stops = parameters.stop_ids[parameters.stop_ids < self._vocab_size]
            rules = read_rules(sampling, self._vocab_size) if has_rules(sampling) else None
            self._hold(slot, np.ascontiguousarray(stops, dtype=np.int32), rules)

    def sample(self, logits: Float32Array, slots: Int32Array, positions: Int32Array, table: SlotTable) -> Sampled:
        """Draw for ``slots`` [rows] from ``logits`` fp32 [rows, vocab]; see ``workers/sampling.py``."""
        count = len(slots)
        if not count:
            return Sampled(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint8), [])
        rows = self._slots[slots]
        rows["position"] = positions
        rows["tokens"] = table.tokens.ctypes.data + slots.astype(np.uint64) * np.uint64(table.tokens.strides[0])
        early = positions - rows["prompt_length"] < self._min_tokens[slots]
        rows["suppressed_count"][~early] = 0
        offsets, records = _room(rows["alternatives"])
        rows["record"] = offsets[:-1]
        ids, status = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.uint8)
        self._call("sample", rows, count, _sound(logits, count, self._vocab_size), ids, status, records)
        return Sampled(ids, status, _cut(records, offsets))

    def token_records(
        self, logits: Float32Array, tokens: Int32Array, alternatives: Int64Array
    ) -> tuple[list[bytes], BoolArray]:
        """The record of each row's token, and whether the row's numbers are all right."""
        count = len(tokens)
        offsets, records = _room(alternatives)
        sound = np.empty(count, dtype=np.bool_)
        tokens = np.ascontiguousarray(tokens, dtype=np.int32)
        shown = np.ascontiguousarray(alternatives, dtype=np.int32)
        logits = _sound(logits, count, self._vocab_size)
        self._call("token_records", count, logits, tokens, shown, offsets, records, sound)
        return _cut(records, offsets), sound

    def close(self) -> None:
        """Free the library's part; the team is its owner's to close."""
        if self._sampler:
            self._functions["sampler_destroy"](self._sampler)
            self._sampler = ctypes.c_void_p()

    def _call(self, name: str, *arguments: npt.NDArray[Any] | int) -> None:
        passed = [each if isinstance(each, int) else each.ctypes.data for each in arguments]
        self._checked(self._functions[name](self._sampler, *passed))

    def _checked(self, status: int) -> None:
        if status:
            raise MemoryError("no memory for the sampler")

    def _hold(self, slot: int, stops: Int32Array, rules: LogitRules | None) -> None:
        """Keep arrays of a slot and put their addresses into its row."""
        row = self._slots[slot]
        none = np.zeros(0, dtype=np.int32)
        allowed = none if rules is None or rules.allowed is None else rules.allowed
        words = [] if rules is None else rules.endings
        parts = [part for word in words for part in (np.array([len(word)], dtype=np.int32), word)]
        endings = np.concatenate([none, *parts])
        bias_ids, biases, forbidden = (
            (none, none, none)
            if rules is None
            else (
                rules.bias_ids,
                rules.biases,
                rules.forbidden,
            )
        )
        row["suppressed_count"], row["bias_count"] = len(stops), len(bias_ids)
        row["allowed_count"] = len(allowed) if rules is not None and rules.allowed is not None else -1
        row["forbidden_count"], row["endings_size"] = len(forbidden), len(endings)
        held = {
            "suppressed": stops,
            "bias_ids": bias_ids,
            "biases": biases,
            "allowed": allowed,
            "forbidden": forbidden,
            "endings": endings,
        }
        for name, array in held.items():
            row[name] = array.ctypes.data
        self._held[slot] = tuple(held.values())


def _room(alternatives: npt.NDArray[Any]) -> tuple[Int64Array, npt.NDArray[np.uint8]]:
    """Offsets [rows + 1] of records with these numbers of alternatives (-1: no record), and memory for them."""
    sizes = np.where(alternatives < 0, 0, record_size(0) + alternatives.astype(np.int64) * _PAIR_BYTES)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])
    return offsets, np.empty(int(offsets[-1]), dtype=np.uint8)


def _cut(records: npt.NDArray[np.uint8], offsets: Int64Array) -> list[bytes]:
    data, ends = records.tobytes(), offsets.tolist()
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def _sound(logits: Float32Array, rows: int, vocab_size: int) -> Float32Array:
    assert logits.shape == (rows, vocab_size) and logits.dtype == np.float32, "logits of other rows"
    return np.ascontiguousarray(logits)


_PAIR_BYTES = record_size(1) - record_size(0)
