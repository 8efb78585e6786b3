"""What a request forbids or favours, out of its packed fields: token biases, allowed ids, bad words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.packing import unpack_biases, unpack_u32
from protocol.requests import Sampling
from workers.slots import Int32Array


@dataclass(frozen=True)
class LogitRules:
    """One sequence's; ids outside the vocabulary are gone."""

    bias_ids: Int32Array
    biases: npt.NDArray[np.float32]
    allowed: Int32Array | None
    """None allows every id."""
    forbidden: Int32Array
    """Bad words of one id."""
    endings: tuple[Int32Array, ...]
    """Longer bad words: the last id must not follow those before it."""


def has_rules(sampling: Sampling) -> bool:
    """Whether ``read_rules`` has something to read."""
    return bool(sampling.logit_bias or sampling.allowed_ids or sampling.bad_words)


def read_rules(sampling: Sampling, vocab_size: int) -> LogitRules:
    """Unpack what a request asks for."""
    biases = unpack_biases(sampling.logit_bias)
    biases = biases[biases["id"] < vocab_size]
    words = [unpack_u32(word) for word in sampling.bad_words]
    words = [word for word in words if len(word) and word.max() < vocab_size]
    allowed = unpack_u32(sampling.allowed_ids)
    return LogitRules(
        bias_ids=biases["id"].astype(np.int32),
        biases=biases["bias"].astype(np.float32),
        allowed=allowed[allowed < vocab_size].astype(np.int32) if sampling.allowed_ids else None,
        forbidden=np.array([word[0] for word in words if len(word) == 1], dtype=np.int32),
        endings=tuple(word.astype(np.int32) for word in words if len(word) > 1),
    )
