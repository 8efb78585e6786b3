"""What a frontend asks for: the structs inside ``Submit`` that travel on, unchanged, to a worker."""

from __future__ import annotations

from typing import Annotated

import msgspec

from protocol.base import U64, Count, Wire

MAX_IDS_PER_ROW = 8
"""Most token ids a row of a step may return."""

MAX_CHOICES = 256
"""Most choices of one Submit; a list of prompts times n is bounded by the same number in a frontend."""

MAX_LOGIT_BIASES = 1024
"""Most tokens with a bias."""

MAX_BAD_WORDS = 256
"""Most sequences that must not be completed: a frontend sends each word of a client in two spellings."""

MAX_BAD_WORD_IDS = 256
"""Most ids of one such sequence."""

Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]


class Sampling(Wire, frozen=True):
    """How tokens are chosen, and what is told about them. The defaults are neutral: plain sampling at temperature 1."""

    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 1.0
    """0 is argmax; ties go to the lowest id."""
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Count = 0
    """0 is off."""
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=100.0)] = 1.0
    min_tokens: Count = 0
    """Stop ids are not sampled before this many output tokens."""
    logprobs: Annotated[int, msgspec.Meta(ge=-1, le=20)] = -1
    """Alternatives reported per output token; -1 is no logprobs at all."""
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=-1, le=20)] = -1
    """Alternatives reported per prompt token; -1 is no prompt logprobs at all."""
    logit_bias: bytes = b""
    """Pairs of (token id u32, finite bias f32), little endian; no id twice."""
    allowed_ids: bytes = b""
    """Token ids u32; empty allows all."""
    bad_words: tuple[bytes, ...] = ()
    """Each a sequence of token ids u32 that must not be completed, wherever in prompt or output it began."""


class Grammar(Wire, frozen=True):
    """A constraint on the output, compiled by the worker leader."""

    kind: Annotated[str, msgspec.Meta(pattern="^(json_schema|json_object|regex|choice|lark)$")]
    source: Annotated[str, msgspec.Meta(max_length=65536)]


class Reasoning(Wire, frozen=True):
    """Where thinking starts and ends in token ids, and how long it may last."""

    start_ids: bytes
    end_ids: bytes
    starts_inside: bool = False
    budget: int = -1
    """Most thinking tokens; -1 is no limit."""
    forced_end_ids: bytes = b""


class Choice(Wire, frozen=True):
    """One output sequence of a Submit."""

    rid: U64
    seed: U64
    """u64; the noise for (seed, position, token id) is a pure function, see the sampler."""
    resume: bytes = b""
    """u32 ids already received by the frontend, held-back text included; the next index is their count."""
    suspicion: Count = 0
    """Group deaths this choice was part of; kept over a resume."""
    numerics: bytes = b""
    """The numeric class that computed the resumed ids, as Started told; empty: any will do."""
