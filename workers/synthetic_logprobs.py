"""Logprobs of engines that have no logits: made up, exact, and the same every time.

A record is a pure function of (key, place, token id): the key says whose answer it is, the place is a position of the
output or of the prompt. It looks like a model's: one distribution, at most 20 alternatives in falling order, ties by
the lower id, probabilities that add up to less than 1. A token comes first, second or third, now and then far behind;
at one place in four all but a few tokens have minus infinity, at times the token itself too.

::

    nth most likely     -(1 + n/2 + noise), noise of the place in [0, 1/4)         n = 0, 1, …
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from protocol.logprobs import pack_records, prompt_records_of_chunk
from protocol.worker import RowStatus
from workers.engine import RowResults
from workers.slots import SlotTable, StepBatch

MASK = (1 << 64) - 1
FAR_BEHIND = 40


def synthetic_record(
    key: int, place: int, token: int, alternatives: int, vocab_size: int
) -> tuple[int, list[tuple[int, float]]]:
    """(rank, [(id, logprob)]): the token, then the most likely ones; there must be as many in the vocabulary."""
    bits = _mixed(key, place)
    cut = bits >> 8 & 3 == 0
    if cut:
        # Two or three tokens are possible; every other one has minus infinity.
        possible = min(2 + (bits >> 10 & 1), vocab_size)
        rank = 1 + (bits >> 12) % (possible + 1)
    else:
        possible = vocab_size
        rank = 1 + (bits >> 12) % (FAR_BEHIND if bits >> 20 & 7 == 0 else 3)
    rank = min(rank, vocab_size)
    shown = _likeliest(token, rank, min(possible, max(alternatives, rank)), bits >> 24, vocab_size)
    pairs = [(each, _logprob(bits, nth)) for nth, each in enumerate(shown)]
    if rank > len(shown):  # the token is among the impossible ones
        rank += token - sum(each < token for each in shown)
        own = (token, -np.inf)
    else:
        own = pairs[rank - 1]
    if len(pairs) < alternatives:
        finite = set(shown)
        impossible = (each for each in range(vocab_size) if each not in finite)
        pairs += [(each, -np.inf) for each in islice(impossible, alternatives - len(pairs))]
    return rank, [own, *pairs[:alternatives]]


def with_logprobs(results: RowResults, batch: StepBatch, table: SlotTable, keys: Callable[[int], int]) -> RowResults:
    """The results of a step with the records that its rows asked for; ``keys`` gives a slot's key."""
    ends = np.cumsum(results.counts, dtype=np.int64)
    logprobs, prompt_logprobs = [], []
    vocab_size = table.shape.vocab_size
    for row, slot in enumerate(batch.slots.tolist()):
        parameters = table.parameters[slot]
        assert parameters is not None, "an occupied slot has parameters"
        sampling = parameters.sampling
        if sampling.logprobs >= 0:
            ids = results.ids[ends[row] - int(results.counts[row]) : ends[row]].tolist()
            first = int(table.length[slot] - table.prompt_len[slot])
            logprobs.append(_packed(keys(slot), first, ids, sampling.logprobs, vocab_size))
        if sampling.prompt_logprobs >= 0 and row >= batch.num_decodes and results.status[row] == RowStatus.OK:
            start = int(batch.starts[row])
            count = prompt_records_of_chunk(start, int(batch.lengths[row]), int(table.prompt_len[slot]))
            tokens = table.tokens[slot, start + 1 : start + 1 + count].tolist()
            prompt_key = prompt_key_of(keys(slot))
            prompt_logprobs.append(_packed(prompt_key, start + 1, tokens, sampling.prompt_logprobs, vocab_size))
    return RowResults(
        results.counts, results.ids, results.status, results.details, b"".join(logprobs), b"".join(prompt_logprobs)
    )


def prompt_key_of(key: int) -> int:
    """The key of the prompt's records, whose places are positions in the prompt."""
    return key ^ MASK


def _packed(key: int, first: int, tokens: Sequence[int], alternatives: int, vocab_size: int) -> bytes:
    records = [synthetic_record(key, first + nth, token, alternatives, vocab_size) for nth, token in enumerate(tokens)]
    pairs = np.array([record[1] for record in records], dtype=np.float64).reshape(len(tokens), 1 + alternatives, 2)
    ranks = np.array([rank for rank, _ in records], dtype=np.int64)
    return pack_records(ranks, pairs[:, :, 0], pairs[:, :, 1], alternatives)


def _likeliest(token: int, rank: int, count: int, start: int, vocab_size: int) -> list[int]:
    """``count`` ids, the token at its rank if that is among them; the others follow each other in the vocabulary."""
    ids = [(start + nth) % vocab_size for nth in range(min(count + 1, vocab_size))]
    ids = [each for each in ids if each != token][:count]
    return [*ids[: rank - 1], token, *ids[rank - 1 : count - 1]] if rank <= count else ids


def _logprob(bits: int, nth: int) -> float:
    return -(1 + nth / 2 + (bits & 255) / 1024)


def _mixed(key: int, place: int) -> int:
    """splitmix64 of key and place."""
    z = (key + (place + 1) * 0x9E3779B97F4A7C15) & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)
