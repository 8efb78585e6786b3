"""What a Submit must be before it is queued: every check, and the request it becomes.

A Submit is taken or refused as a whole. Nothing here looks at load; see Cell for that.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from protocol.block_hashes import HASH_BYTES, root_hash
from protocol.frontend import ModelInfo, RejectCode, Submit
from protocol.ids import SessionId
from protocol.packing import PackingError, unpack_biases, unpack_u32
from protocol.requests import MAX_BAD_WORD_IDS, MAX_BAD_WORDS, MAX_LOGIT_BIASES, Sampling
from scheduler.requests import NO_OUTPUT, Int32Array, Request, Sequence

U64_END = 1 << 64


class SubmitRefused(ValueError):
    """A Submit that is not taken; says why in words for a client."""

    def __init__(self, code: RejectCode, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_ms = retry_after_ms


def read_submit(submit: Submit, session: SessionId, model: ModelInfo, now: float, arrivals: Iterator[int]) -> Request:
    """The request of a Submit, its choices not queued yet. Raises SubmitRefused."""
    _check_supported(submit)
    prompt = _ids(submit.tokens, "tokens", model.vocab_size)
    if not len(prompt):
        raise SubmitRefused(RejectCode.INVALID, "the prompt has no tokens")
    scoring = not submit.max_tokens
    if len(prompt) + (not scoring) > model.context:
        raise SubmitRefused(
            RejectCode.NEVER_FITS,
            f"the prompt has {len(prompt)} tokens and the model's context is {model.context} tokens, output included",
        )
    if len(submit.block_hashes) != HASH_BYTES * (len(prompt) // submit.block_size if submit.block_size else 0):
        raise SubmitRefused(
            RejectCode.INVALID,
            f"{len(submit.block_hashes)} bytes of hashes, {HASH_BYTES} each, for blocks of {submit.block_size} tokens",
        )
    stops = _ids(submit.stop_ids, "stop ids", model.vocab_size)
    _check_sampling(submit.sampling, model.vocab_size)
    request = Request(
        session=session,
        model=submit.model,
        prompt=prompt,
        limit=min(submit.max_tokens, model.context - len(prompt)),
        scoring=scoring,
        sampling=submit.sampling,
        stop_ids=submit.stop_ids,
        stops=frozenset(stops.tolist()),
        priority=submit.priority,
        tenant=submit.tenant,
        deadline=None if submit.remaining_ms is None else now + submit.remaining_ms / 1000,
        block_hashes=submit.block_hashes,
        hash_block_size=submit.block_size,
        root=root_hash(submit.salt, submit.adapter),
    )
    for choice in submit.choices:
        if not (0 <= choice.rid < U64_END and 0 <= choice.seed < U64_END):
            raise SubmitRefused(RejectCode.INVALID, "a rid or a seed is not a u64")
        output = _ids(choice.resume, "resumed ids", model.vocab_size)
        request.choices.append(
            Sequence(
                request,
                choice.rid,
                choice.seed,
                next(arrivals),
                output,
                suspicion=choice.suspicion,
                numerics=choice.numerics if len(output) else b"",
            )
        )
    if len({choice.rid for choice in request.choices}) != len(request.choices):
        raise SubmitRefused(RejectCode.INVALID, "two choices have one rid")
    return request


def _check_supported(submit: Submit) -> None:
    """Fields that are declared and that no worker honours yet must be neutral."""
    unsupported = [
        name
        for name, used in (
            ("grammar", submit.grammar is not None),
            ("reasoning", submit.reasoning is not None),
            ("adapter", bool(submit.adapter)),
        )
        if used
    ]
    if unsupported:
        raise SubmitRefused(RejectCode.UNSUPPORTED, f"not supported by these workers: {', '.join(unsupported)}")


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Everything about a Sampling that its types do not say. Raises SubmitRefused."""
    if max(sampling.logprobs, sampling.prompt_logprobs) > vocab_size:
        raise SubmitRefused(
            RejectCode.INVALID, f"more alternatives are asked for than the {vocab_size} tokens there are"
        )
    if sampling.logit_bias:
        _check_biases(sampling.logit_bias, vocab_size)
    if sampling.allowed_ids and len(_ids(sampling.allowed_ids, "allowed ids", vocab_size)) > vocab_size:
        raise SubmitRefused(RejectCode.INVALID, f"allowed ids: more than the {vocab_size} tokens there are")
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        raise SubmitRefused(RejectCode.INVALID, f"bad words: more than {MAX_BAD_WORDS}")
    for word in sampling.bad_words:
        if not 0 < len(_ids(word, "bad words", vocab_size)) <= MAX_BAD_WORD_IDS:
            raise SubmitRefused(RejectCode.INVALID, f"bad words: one has no ids, or more than {MAX_BAD_WORD_IDS}")


def _check_biases(data: bytes, vocab_size: int) -> None:
    try:
        biases = unpack_biases(data)
    except PackingError as error:
        raise SubmitRefused(RejectCode.INVALID, f"logit bias: {error}") from error
    if len(biases) > MAX_LOGIT_BIASES or len(np.unique(biases["id"])) < len(biases):
        raise SubmitRefused(RejectCode.INVALID, f"logit bias: more than {MAX_LOGIT_BIASES} tokens, or one twice")
    if biases["id"].max() >= vocab_size:
        raise SubmitRefused(RejectCode.INVALID, f"logit bias: {biases['id'].max()} is outside the vocabulary")
    if not np.isfinite(biases["bias"]).all():
        raise SubmitRefused(RejectCode.INVALID, "logit bias: a bias is not finite")


def _ids(data: bytes, what: str, vocab_size: int) -> Int32Array:
    if not data:
        return NO_OUTPUT
    try:
        ids = unpack_u32(data)
    except PackingError as error:
        raise SubmitRefused(RejectCode.INVALID, f"{what}: {error}") from error
    if ids.max() >= vocab_size:
        raise SubmitRefused(RejectCode.INVALID, f"{what}: {ids.max()} is outside the vocabulary of {vocab_size}")
    return ids.astype(np.int32)
