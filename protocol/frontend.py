"""Messages between a frontend and the scheduler."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec

from protocol.base import U64, Count, Name, Text, Wire
from protocol.requests import MAX_CHOICES, Choice, Grammar, Reasoning, Sampling
from protocol.session import Ping, Pong, Unwelcome


class Hello(Wire, frozen=True, tag=1):
    """A frontend opens a session."""

    nonce: U64
    instance: U64
    oldest_version: Count
    newest_version: Count


class Submit(Wire, frozen=True, tag=2):
    """One prompt and its choices, admitted or rejected as one; each choice gets exactly one finish or reject."""

    choices: Annotated[tuple[Choice, ...], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)]
    model: Name
    tokens: bytes
    """The prompt's u32 token ids."""
    max_tokens: Count
    """Most output tokens, those of a resume included; 0 ends each choice once its prompt is computed."""
    sampling: Sampling = Sampling()
    stop_ids: bytes = b""
    """u32 ids that end the output: the model's end tokens (absent under ignore_eos) and the client's."""
    block_hashes: bytes = b""
    """16 bytes (protocol/block_hashes.py) per full prompt block of ``block_size`` tokens."""
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    """Lower runs earlier."""
    tenant: Annotated[str, msgspec.Meta(max_length=256)] = ""
    remaining_ms: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Time left of the request's total deadline; None is no deadline."""
    salt: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    grammar: Grammar | None = None
    reasoning: Reasoning | None = None
    adapter: Annotated[str, msgspec.Meta(max_length=256)] = ""
    block_size: Count = 0
    """Tokens of a hashed block: groups with blocks of that size may reuse prefixes. 0: nothing is reused or kept."""


class Abort(Wire, frozen=True, tag=3):
    """End these choices: exact ids, idempotent, legal in any state; answered by a finish unless already finished."""

    rids: tuple[U64, ...]


PRIORITY_CLASSES = ("urgent", "normal", "background")
"""Priorities below, at and above 0."""


class Inquire(Wire, frozen=True, tag=4):
    """What became of these choices? Answered by Told; changes nothing."""

    nonce: U64
    rids: Annotated[tuple[U64, ...], msgspec.Meta(max_length=MAX_CHOICES)]


LOWEST_PRIORITY = -100
"""The most urgent one: nothing is displaced by a Submit of it or above."""


class Credit(Wire, frozen=True):
    """What a frontend may still submit before it must answer 429 itself.

    What it sent and the scheduler had not read when this was written, it takes off itself: see ``taken_requests``.
    """

    requests: Count
    """Choices."""
    tokens: Count
    displaces: Annotated[int, msgspec.Meta(ge=-100, le=100)] = LOWEST_PRIORITY
    """A Submit whose priority is a lower number than this is taken without credit: something less urgent gives way."""
    retry_after_ms: Count = 0
    """When a client that is turned away should come back."""
    taken_requests: U64 = 0
    """Choices of this session's Submits that the scheduler has read so far, refused ones included."""
    taken_tokens: U64 = 0


class Limits(Wire, frozen=True):
    """Bounds a frontend checks before it sends."""

    max_choices: Count
    max_queue_requests: Count
    max_queue_tokens: Count


class ModelInfo(Wire, frozen=True):
    """One registered model, as its groups described it."""

    name: Name
    tokenizer_digest: bytes
    numerics_digest: bytes
    vocab_size: Count
    context: Count
    """Effective context in tokens: min(config, pool - watermark) over the model's groups."""
    block_size: Count
    max_ids_per_row: Count
    ready_groups: Count


class Welcome(Wire, frozen=True, tag=33):
    """The session is open; the nonce is the one of the Hello it answers."""

    nonce: U64
    epoch: U64
    session: U64
    version: Count
    models: tuple[ModelInfo, ...]
    limits: Limits
    credit: Credit


class FinishReason(IntEnum):
    """Why a choice ended, as far as a scheduler can tell."""

    STOP = 1
    """A stop id was sampled; it is the last id and ``detail_id`` names it."""
    LENGTH = 2
    """max_tokens or the context is used up."""
    ABORT = 3
    DEADLINE = 4
    ERROR = 5
    """The row failed in the engine; ``message`` says how."""
    GRAMMAR = 6
    NO_TOKEN = 7
    """What the request allows and forbids leaves no token to go on with."""


class Finish(Wire, frozen=True):
    """The end of one choice. Travels in the same frame as the choice's last ids."""

    rid: U64
    reason: FinishReason
    count: Count
    """Output ids the choice has in total, those of a resume included."""
    stop_id: int = -1
    message: Text = ""


class Started(Wire, frozen=True):
    """A choice was admitted to a group for the first time in this session."""

    rid: U64
    group: Name
    cached_tokens: Count
    numerics: bytes = b""
    """The group's numeric class; a resume asks for it again."""


class PromptLogprobs(Wire, frozen=True):
    """Logprobs of consecutive prompt tokens of one choice, each sent once per session."""

    rid: U64
    first: Count
    """Prompt position of the first token judged here; position 0 never is."""
    records: bytes
    """See protocol/logprobs.py."""


class Frame(Wire, frozen=True, tag=34):
    """All that one step of one group means to one frontend: at most one per (step, frontend).

    The arrays have one row per choice that got ids; ``ids`` is their concatenation in row order.
    """

    group: Annotated[str, msgspec.Meta(max_length=256)]
    """Empty for a frame that no step caused (an abort of a queued request)."""
    step: U64
    rids: bytes = b""
    """u64[rows]"""
    first: bytes = b""
    """u32[rows]: index, within the choice's output, of the first id here."""
    counts: bytes = b""
    """u8[rows]"""
    ids: bytes = b""
    """u32[sum(counts)]"""
    finishes: tuple[Finish, ...] = ()
    started: tuple[Started, ...] = ()
    logprobs: bytes = b""
    """One record (protocol/logprobs.py) per id of each row whose choice asked for logprobs, in row order."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class Frames(Wire, frozen=True, tag=40):
    """Frames of several steps that came within one turn of the scheduler, in order: one wake-up for all of them."""

    frames: tuple[Frame, ...]


class RejectCode(IntEnum):
    """Why a Submit was not taken."""

    OVERLOADED = 1
    INVALID = 2
    UNSUPPORTED = 3
    UNKNOWN_MODEL = 4
    NEVER_FITS = 5
    UNAVAILABLE = 6
    DRAINING = 7


class Reject(Wire, frozen=True, tag=35):
    """A Submit was not taken; none of its choices will get anything else."""

    rids: tuple[U64, ...]
    code: RejectCode
    message: Text
    retry_after_ms: Count = 0


class GroupLoad(Wire, frozen=True):
    """One group's pools and counters; counters restart with the scheduler."""

    group: Name
    model: Name
    ready: bool
    blocks_total: Count
    blocks_used: Count
    blocks_cached: Count
    requests_running: Count
    requests_waiting: Count
    """Requests placed on this group and not admitted; 0 while all waiting is central."""
    preemptions: U64
    prompt_tokens: U64
    generation_tokens: U64
    steps: U64
    step_us: U64
    """Summed duration of all steps, microseconds, as workers measured them."""
    cached_tokens: U64 = 0
    """Of ``prompt_tokens``: found in the prefix cache when the request started."""


class Load(Wire, frozen=True, tag=36):
    """The scheduler's state: sent about every 250 ms while it changes, every second otherwise."""

    credit: Credit
    requests_running: Count
    requests_waiting: Count
    waiting_tokens: Count
    frames_dropped: U64
    groups: tuple[GroupLoad, ...]
    waiting_by_priority: tuple[Count, ...] = ()
    """Of ``requests_waiting``, by PRIORITY_CLASSES, as their waiting has made them."""
    shed: U64 = 0
    """Waiting choices that gave way to more urgent ones, since the scheduler's start."""


class Phase(IntEnum):
    """What a choice is doing."""

    QUEUED = 1
    """It waits for a group; also when it was preempted or lost its group."""
    PREFILL = 2
    """It holds a slot, and its next id is the first since it does."""
    DECODE = 3
    ENDED = 4


class Span(Wire, frozen=True):
    """A choice was in one phase."""

    phase: Phase
    group: Annotated[str, msgspec.Meta(max_length=256)]
    """Empty while it waits."""
    at_us: U64
    """Since its Submit."""
    us: U64


class Timeline(Wire, frozen=True):
    """Where one choice's time went, since its Submit in this session."""

    rid: U64
    submitted_us_ago: U64
    lasted_us: U64
    """From its Submit to its end, or to now."""
    phase: Phase
    queued_us: U64
    prefill_us: U64
    decode_us: U64
    prompt_tokens: Count
    cached_tokens: Count
    """Prompt tokens that its first start found computed."""
    output_tokens: Count
    """Those of a resume included; 0 until it has ended."""
    starts: Count
    """How often it was given a slot."""
    preemptions: Count
    losses: Count
    """Steps and groups that failed under it."""
    ended: Text
    """Why, as a finish reason or ``rejected: `` and a code; empty while it has not."""
    message: Text
    spans: tuple[Span, ...]
    """In order, the first ones of a life with many."""


class Told(Wire, frozen=True, tag=50):
    """The timelines asked for, without those that are not known (any more)."""

    nonce: U64
    timelines: tuple[Timeline, ...]


class ModelUp(Wire, frozen=True, tag=37):
    """A model has a (new) ready group, or its description changed."""

    model: ModelInfo


class ModelDown(Wire, frozen=True, tag=38):
    """The last ready group of a model is gone; its requests wait for a relaunch."""

    name: Name
    reason: Text


class Drain(Wire, frozen=True, tag=39):
    """The scheduler stops taking requests and ends what runs within this time."""

    remaining_ms: Count


FrontendToScheduler = Hello | Submit | Abort | Inquire | Ping
SchedulerToFrontend = Welcome | Unwelcome | Frame | Frames | Reject | Load | ModelUp | ModelDown | Pong | Drain | Told
