"""From a checked request to what the scheduler is asked for: budget, sampling parameters, stop rules."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from frontend import errors
from frontend.request.requests import CommonFields
from protocol.ids import hash64
from protocol.packing import BIAS, pack_u32
from protocol.requests import Sampling

NumberT = TypeVar("NumberT", int, float)

NEARLY_ZERO = 1e-6
"""top_p 0 means "the most likely token only"; on the wire top_p is above 0."""


@dataclass(frozen=True)
class Defaults:
    """Sampling defaults where a request gives none."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0

    @classmethod
    def of_model(cls, generation_config: dict[str, Any]) -> Defaults:
        """From generation_config.json; values of the wrong type or out of range are as good as absent."""
        plain = cls()
        return cls(
            temperature=_number(generation_config.get("temperature"), 0.0, 2.0, plain.temperature),
            top_p=_number(generation_config.get("top_p"), NEARLY_ZERO, 1.0, plain.top_p),
            top_k=int(_number(generation_config.get("top_k"), 0, 2**31 - 1, plain.top_k)),
            repetition_penalty=_number(
                generation_config.get("repetition_penalty"), 0.01, 100.0, plain.repetition_penalty
            ),
        )


@dataclass(frozen=True)
class Budget:
    """How many tokens a request may make."""

    max_tokens: int
    clamped: bool
    """The client asked for more."""


@dataclass(frozen=True)
class StopRules:
    """What ends an output, as the frontend judges it from the ids."""

    max_tokens: int
    min_tokens: int = 0
    """Neither an id nor a string ends the output before this many tokens."""
    strings: tuple[str, ...] = ()
    client_ids: frozenset[int] = frozenset()
    """The client's stop_token_ids: stop_reason names them."""
    end_ids: frozenset[int] = frozenset()
    """The model's end tokens; empty under ignore_eos."""
    show_stop: bool = False
    """What stopped the output is part of it."""

    @property
    def ids(self) -> frozenset[int]:
        return self.client_ids | self.end_ids


def budget(
    request: CommonFields,
    *,
    prompt: int,
    context: int,
    default: int | None,
    where: str,
    param: str,
    strict: bool = False,
) -> Budget:
    """The output limit within the context.

    ``default`` is the limit without one from the client; None is the rest of the context. Raises ApiError for a prompt
    that fills the context, for a limit of 0 unless the prompt is echoed as text, and when ``strict`` for a limit that
    the context has no room for.
    """
    field, asked = request.output_limit()
    if asked == 0 and where == "messages":
        raise errors.invalid_value(field, f"Invalid value for '{field}': expected at least 1, or -1 for none, got 0.")
    if asked == 0 and not request.echo:
        raise errors.invalid_value(field, f"Invalid value for '{field}': 0 is only for a prompt with 'echo', got 0.")
    room = context - prompt
    if room < (asked != 0):
        raise errors.context_exceeded(context, prompt, asked or 0, where=where, param=param)
    if strict and asked is not None and asked > room:
        raise errors.context_exceeded(context, prompt, asked, where=where, param=field)
    wanted = asked if asked is not None else default if default is not None else room
    limit = min(wanted, room)
    least = request.min_tokens or 0
    if least > limit:
        raise errors.invalid_value(
            "min_tokens", f"Invalid value for 'min_tokens': expected at most the output limit of {limit}, got {least}."
        )
    return Budget(limit, clamped=asked is not None and asked > room)


def sampling(
    request: CommonFields, defaults: Defaults, *, vocabulary: int, bad_words: tuple[bytes, ...] = ()
) -> Sampling:
    """The sampling parameters on the wire, of a request that was checked."""
    top_k = _or(request.top_k, defaults.top_k)
    return Sampling(
        temperature=_or(request.temperature, defaults.temperature),
        top_p=max(_or(request.top_p, defaults.top_p), NEARLY_ZERO),
        top_k=top_k if 0 < top_k < vocabulary else 0,
        min_p=_or(request.min_p, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        min_tokens=_or(request.min_tokens, 0),
        logprobs=request.alternatives(),
        prompt_logprobs=request.scores_prompt(),
        logit_bias=_packed_biases(request.logit_bias or {}),
        allowed_ids=pack_u32(sorted(set(request.allowed_token_ids or ()))),
        bad_words=bad_words,
    )


def stop_rules(request: CommonFields, end_ids: tuple[int, ...], *, max_tokens: int) -> StopRules:
    """What ends this request's output."""
    return StopRules(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        strings=tuple(request.stop_strings()),
        client_ids=frozenset(request.stop_token_ids or ()),
        end_ids=frozenset() if request.ignore_eos else frozenset(end_ids),
        show_stop=bool(request.include_stop_str_in_output),
    )


def seeds(request: CommonFields) -> tuple[int, ...]:
    """One seed for each choice of a prompt: from the client's as a u64, or from one drawn now."""
    first = secrets.randbits(64) if request.seed is None else request.seed % 2**64
    return (first, *(hash64(first, index) for index in range(1, request.choices)))


def _packed_biases(biases: dict[str, float]) -> bytes:
    pairs = np.empty(len(biases), dtype=BIAS)
    pairs["id"] = [int(token) for token in biases]
    pairs["bias"] = list(biases.values())
    return pairs.tobytes()


def _or(value: NumberT | None, default: NumberT) -> NumberT:
    return default if value is None else value


def _number(value: object, low: float, high: float, default: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        return default
    return value
