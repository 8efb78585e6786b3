"""A request and its choices, as the scheduler keeps them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from protocol.block_hashes import block_hashes, split_hashes
from protocol.frontend import FinishReason
from protocol.ids import BlockHash, SessionId
from protocol.packing import pack_u32
from protocol.requests import Sampling

Int32Array = npt.NDArray[np.int32]

NO_OUTPUT: Int32Array = np.empty(0, dtype=np.int32)
NO_HASH = BlockHash(b"")


class State(Enum):
    """Where a choice is in its life.

    ::

        QUEUED → RUNNING → FINISHED
           ↑        │ preempted while a plan that names it is out
           └── SETTLING
    """

    QUEUED = "queued"
    RUNNING = "running"
    """It holds a slot of a group."""
    SETTLING = "settling"
    """Preempted; a plan that names it is still out, and its ids belong to the output."""
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One Submit: what its choices share."""

    session: SessionId
    model: str
    prompt: Int32Array
    limit: int
    """Most output tokens: max_tokens, or what the context leaves."""
    scoring: bool
    """max_tokens is 0: each choice ends once its prompt is computed."""
    sampling: Sampling
    stop_ids: bytes
    """u32, as they travel on to the worker."""
    stops: frozenset[int]
    priority: int
    deadline: float | None
    tenant: str = ""
    """Whose turn it is taken in."""
    block_hashes: bytes = b""
    """The hash chain of the prompt's full blocks, 16 bytes each."""
    hash_block_size: int = 0
    """Tokens of each such block; 0: no prefix is to be reused."""
    root: BlockHash = NO_HASH
    """The parent of its first block's hash."""
    choices: list[Sequence] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Every choice had its finish."""
        return all(choice.state is State.FINISHED for choice in self.choices)


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of a request.

    ``output`` is current except while RUNNING: then the group's arrays hold it.
    """

    request: Request
    rid: int
    seed: int
    arrival: int
    """Counter over all choices of a cell; ties in priority go to the earlier."""
    output: Int32Array = field(default_factory=lambda: NO_OUTPUT)
    suspicion: int = 0
    """Group deaths that it was there at and has not been cleared of; see suspects.py."""
    numerics: bytes = b""
    """The numeric class its output comes from; empty while it has none. See numeric_classes.py."""
    admitted_at: int = 0
    """Steps its group had done when it was admitted there."""
    state: State = State.QUEUED
    slot: int = -1
    settles_at: int = 0
    """While SETTLING: the last step that names it."""
    group: str = ""
    """The group it ran on last."""
    started: bool = False
    """Its frontend was told that it was admitted."""
    cached_tokens: int = 0
    """Prompt tokens that its first start found in the group's prefix cache."""
    passed_over: int = 0
    """Later requests admitted before it because it did not fit."""
    parked_at: str = ""
    """The group that it waits for while that computes its prefix."""
    judged: int = 0
    """Prompt tokens whose logprobs its frontend has: those at positions 1 … judged."""
    chain: list[BlockHash] = field(default_factory=list)
    """Hashes of its leading full blocks, as far as they were needed; see ``chain_to``."""

    @property
    def rank(self) -> tuple[int, int]:
        """Importance: lower runs earlier and is preempted later."""
        return (self.request.priority, self.arrival)

    @property
    def length(self) -> int:
        """Tokens to prefill when it is admitted now: the prompt and the output so far."""
        return len(self.request.prompt) + len(self.output)

    @property
    def sampling(self) -> Sampling:
        """What its next prefill is to do: no prompt logprobs when its frontend has them all."""
        sampling = self.request.sampling
        if sampling.prompt_logprobs < 0 or self.judged < len(self.request.prompt) - 1:
            return sampling
        return replace(sampling, prompt_logprobs=-1)

    def tokens(self) -> Int32Array:
        """Prompt and output, shape [length]."""
        return np.concatenate((self.request.prompt, self.output)) if len(self.output) else self.request.prompt

    @property
    def reusable(self) -> int:
        """Leading tokens that need not be computed when their KV is there.

        Never the last one, whose logits are wanted, nor one whose logits judge a prompt token not judged yet.
        """
        return self.length - 1 if self.sampling.prompt_logprobs < 0 else self.judged

    def chain_to(self, blocks: int) -> list[BlockHash]:
        """Hashes of at least its first ``blocks`` full blocks, output included; none when nothing is to be reused."""
        request, chain = self.request, self.chain
        size = request.hash_block_size
        if not size:
            return chain
        if not chain:
            chain += split_hashes(request.block_hashes)
        if len(chain) < blocks:
            parent = chain[-1] if chain else request.root
            chain += block_hashes(parent, pack_u32(self.tokens()[len(chain) * size : blocks * size]), size)
        return chain

    def append_output(self, ids: npt.NDArray[np.int64]) -> int:
        """Append ids as far as they count: up to a stop id or the limit; returns how many did."""
        first = len(self.output)
        taken = min(self.first_stop(ids.tolist(), first) + 1, len(ids), self.request.limit - first)
        self.output = np.concatenate((self.output, ids[:taken].astype(np.int32)))
        return taken

    def satisfied_by_output(self) -> tuple[FinishReason, int] | None:
        """(reason, stop id) when the output so far already ends this choice, as a resume's may."""
        count = len(self.output)
        if not count and self.request.scoring:
            return None
        if count and not self.first_stop([int(self.output[-1])], count - 1):
            return FinishReason.STOP, int(self.output[-1])
        return (FinishReason.LENGTH, -1) if count >= self.request.limit else None

    def first_stop(self, ids: list[int], first: int) -> int:
        """Position of the first id that ends this choice, the ids' number if none does.

        ``first`` is the output index of the first id; before min_tokens outputs nothing stops.
        """
        stops, earliest = self.request.stops, self.request.sampling.min_tokens
        return next((at for at, token in enumerate(ids) if token in stops and first + at >= earliest), len(ids))
