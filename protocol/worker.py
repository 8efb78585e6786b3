"""Messages between worker leaders or launchers and the scheduler."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec

from protocol.base import U64, Count, Name, Text, Wire
from protocol.requests import MAX_IDS_PER_ROW, Grammar, Sampling
from protocol.session import Ping, Pong, Unwelcome

# ------------------------------------------------------------------------------------------------ leader → scheduler


class Register(Wire, frozen=True, tag=5):
    """A group opens a session: what it is and how much it holds. It has dropped every slot before this."""

    nonce: U64
    oldest_version: Count
    newest_version: Count
    group: Name
    incarnation: U64
    model: Name
    tp: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    max_slots: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    max_tokens_per_step: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    max_ids_per_row: Annotated[int, msgspec.Meta(ge=1, le=MAX_IDS_PER_ROW)]
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    context: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    """Longest sequence the model or the operator allows, in tokens."""
    numerics_digest: bytes
    """Two groups with the same digest give the same tokens for the same request."""
    tokenizer_digest: bytes
    adapters: tuple[str, ...] = ()


class RowStatus(IntEnum):
    """What became of one row of a step."""

    OK = 0
    NOT_READY = 1
    """Nothing was computed: the row's grammar is not compiled; it stays where it was."""
    EMPTY_SUPPORT = 2
    """No token is allowed."""
    NAN = 3
    GRAMMAR_END = 4
    """Ids were sampled and the grammar accepts no more."""
    FAULT = 5


class StepDone(Wire, frozen=True, tag=6):
    """One plan was executed. Rows are in the plan's row order, see Plan."""

    epoch: U64
    incarnation: U64
    step: U64
    counts: bytes
    """u8[rows]: ids each row returned; 0 for a chunk that does not reach the end of its sequence."""
    ids: bytes
    """u32[sum(counts)]"""
    status: bytes
    """u8[rows] of RowStatus"""
    step_us: U64 = 0
    prefill_tokens: U64 = 0
    decode_seqs: U64 = 0
    sum_ctx_decode: U64 = 0
    """Context tokens read by the decode rows."""
    sum_chunk_ctx_prefill: U64 = 0
    """Sum over chunks of chunk length times context length at its end."""
    logprobs: bytes = b""
    """One record (protocol/logprobs.py) per returned id of each row whose ``Sampling.logprobs`` is not -1."""
    prompt_logprobs: bytes = b""
    """Records of the prompt tokens judged by each chunk row that asked for them in its ``Sampling.prompt_logprobs``;
    a row that was not ready or failed gives none."""


class StepFailed(Wire, frozen=True, tag=7):
    """A plan was not executed. The leader discards plans until the next Reset."""

    epoch: U64
    incarnation: U64
    step: U64
    kind: Annotated[str, msgspec.Meta(max_length=64)]
    """``gap``, ``invalid_plan``, ``out_of_memory`` or ``engine``."""
    kv_survived: bool
    message: Text = ""


class AdapterDone(Wire, frozen=True, tag=8):
    """Answer to LoadAdapter or UnloadAdapter."""

    adapter: Name
    ok: bool
    message: Text = ""


# ------------------------------------------------------------------------------------------------ scheduler → leader


class WorkerWelcome(Wire, frozen=True, tag=41):
    """The session of a leader or launcher is open. A leader then waits for Reset."""

    nonce: U64
    epoch: U64
    session: U64
    version: Count


class SlotAdd(Wire, frozen=True):
    """A sequence enters a slot. Its blocks and first chunk come in the same plan or later ones."""

    slot: Count
    tokens: bytes
    """u32 ids: prompt, then for a resumed or preempted sequence its output so far."""
    prompt_len: Count
    """Where output begins, for penalties, min_tokens and noise positions."""
    seed: U64
    sampling: Sampling
    stop_ids: bytes = b""
    """Not sampled before ``sampling.min_tokens`` outputs. Finishing on them is the scheduler's work."""
    computed: Count = 0
    """Leading tokens whose KV is already in the blocks given to this slot."""
    adapter: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Plan(Wire, frozen=True, tag=42):
    """One step of one group, holding only what changed.

    Applied in this order: ``drops`` free slots (their block tables are forgotten), ``adds`` fill slots, ``blocks``
    append to block tables, then the rows run. A slot is *prefilling* until chunks have covered all tokens it was
    added with; the chunk that covers the last one samples. After that it is *decoding*, and takes part in every
    plan until dropped, unless ``skips`` names it. Rows are ordered: decoding slots ascending (those that were
    decoding before this plan), then ``chunks`` in the order given.
    """

    epoch: U64
    incarnation: U64
    step: U64
    drops: bytes = b""
    """u32[n] slots"""
    adds: tuple[SlotAdd, ...] = ()
    blocks: bytes = b""
    """u32[n, 2]: (slot, block), appended to the slot's table in this order"""
    chunks: bytes = b""
    """u32[n, 2]: (slot, tokens to prefill now)"""
    skips: bytes = b""
    """u32[n] decoding slots that sit this step out"""


class Prepare(Wire, frozen=True, tag=43):
    """Compile a grammar now; a request under it is queued."""

    key: bytes
    grammar: Grammar


class LoadAdapter(Wire, frozen=True, tag=44):
    adapter: Name
    path: Annotated[str, msgspec.Meta(max_length=4096)]


class UnloadAdapter(Wire, frozen=True, tag=45):
    adapter: Name


class Reset(Wire, frozen=True, tag=46):
    """Drop every slot; the next plan carries ``first_step``. Opens a session and ends the aftermath of StepFailed."""

    epoch: U64
    first_step: U64


class Stop(Wire, frozen=True, tag=47):
    """Finish what was received and exit with status 0."""

    reason: Text = ""


# --------------------------------------------------------------------------------------------- launcher ↔ scheduler


class LauncherHello(Wire, frozen=True, tag=10):
    """A launcher opens a session."""

    nonce: U64
    oldest_version: Count
    newest_version: Count
    instance: U64


class GroupUp(Wire, frozen=True, tag=11):
    """A group was launched (its leader registers by itself once weights are loaded)."""

    group: Name
    incarnation: U64
    model: Name


class GroupDown(Wire, frozen=True, tag=12):
    """A launch of a group has ended: the sentinel saw a rank go."""

    group: Name
    incarnation: U64
    cause: Text


class DrainGroup(Wire, frozen=True, tag=13):
    """This incarnation is to go: it gets nothing new, and when what runs there has ended, its leader gets Stop."""

    group: Name
    incarnation: U64
    remaining_ms: Count
    """What still runs then goes on elsewhere."""
    reason: Text = ""


class KillGroup(Wire, frozen=True, tag=48):
    """The scheduler gave this incarnation up: kill its ranks and launch another."""

    group: Name
    incarnation: U64
    reason: Text = ""


class SetGroups(Wire, frozen=True, tag=49):
    """Wanted number of groups of a model."""

    model: Name
    groups: Count


LeaderToScheduler = Register | StepDone | StepFailed | AdapterDone | Ping
LauncherToScheduler = LauncherHello | GroupUp | GroupDown | DrainGroup | Ping
WorkerSideToScheduler = (
    Register | StepDone | StepFailed | AdapterDone | Ping | LauncherHello | GroupUp | GroupDown | DrainGroup
)
SchedulerToLeader = WorkerWelcome | Unwelcome | Plan | Prepare | LoadAdapter | UnloadAdapter | Reset | Pong | Stop
SchedulerToLauncher = WorkerWelcome | Unwelcome | Pong | KillGroup | SetGroups | Stop
