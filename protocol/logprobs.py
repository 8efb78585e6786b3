"""Log-probabilities on the wire: fixed-size records, one per token that asked for them.

A record is the token's rank (u32, 1 is the most likely), then 1 + k pairs of (token id u32, logprob f32), little
endian: the token itself, then the k most likely in falling order, ties by the lower id. Values are raw: before
penalties and temperature. Minus infinity stays minus infinity here; what a client is shown is the frontend's affair.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.packing import PackingError

PAIR = np.dtype([("id", "<u4"), ("logprob", "<f4")])


def record_dtype(alternatives: int) -> np.dtype[Any]:
    """The layout of one record with ``alternatives`` (0 … 20) candidates beside the token itself."""
    return np.dtype([("rank", "<u4"), ("pairs", PAIR, (1 + alternatives,))])


def record_size(alternatives: int) -> int:
    """Bytes of one record."""
    return record_dtype(alternatives).itemsize


def pack_records(
    ranks: npt.NDArray[Any], ids: npt.NDArray[Any], logprobs: npt.NDArray[Any], alternatives: int
) -> bytes:
    """Encode records: ``ranks`` [n], ``ids`` and ``logprobs`` [n, 1 + alternatives]."""
    records = np.empty(len(ranks), dtype=record_dtype(alternatives))
    records["rank"] = ranks
    records["pairs"]["id"] = ids
    records["pairs"]["logprob"] = logprobs
    return records.tobytes()


def unpack_records(data: bytes, alternatives: int) -> npt.NDArray[Any]:
    """Read-only records of ``record_dtype``, shape [n]. Raises PackingError on a ragged length."""
    dtype = record_dtype(alternatives)
    if len(data) % dtype.itemsize:
        raise PackingError(f"{len(data)} bytes is not a whole number of {dtype.itemsize}-byte logprob records")
    return np.frombuffer(data, dtype=dtype)


def prompt_records_of_chunk(start: int, length: int, prompt_len: int) -> int:
    """How many prompt logprob records a prefill chunk yields.

    The logits at position p judge the token at p + 1, so a chunk [start, start + length) judges the prompt tokens
    start + 1 … min(start + length, prompt_len - 1); a prompt's first token is never judged.
    """
    return max(0, min(start + length, prompt_len - 1) - start)
