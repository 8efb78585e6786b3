"""Logprob records from raw logits: what the model said, before anything a request asks for changes it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.logprobs import pack_records, record_size
from workers.slots import BoolArray, Int32Array

ROWS_AT_ONCE = 32
"""Rows whose log-softmax exists at a time: it is as large as their logits."""

Int64Array = npt.NDArray[np.int64]


@torch.inference_mode()
def token_records(logits: Tensor, tokens: Int32Array, alternatives: Int64Array) -> tuple[list[bytes], BoolArray]:
    """The record of each row's token, and whether the row's numbers are all right.

    ``logits`` fp32 [rows, vocab]; ``tokens`` and ``alternatives`` (at most the vocabulary) [rows]. A row's record is
    the log-softmax in fp32 and depends on that row alone. A token's rank is 1 + how many tokens have a larger logit,
    or the same and a lower id.
    """
    records: list[bytes] = []
    sound = np.ones(len(tokens), dtype=np.bool_)
    for first in range(0, len(tokens), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        shown = int(alternatives[part].max())
        ranks, ids, values = _judge(logits[part], torch.from_numpy(tokens[part]).to(logits.device), shown)
        sound[part] = ~np.isnan(values[:, 0])
        records += _packed(ranks, ids, values, alternatives[part])
    return records, sound


def _judge(
    logits: Tensor, tokens: Tensor, shown: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """(ranks [rows], ids [rows, 1 + shown], logprobs [rows, 1 + shown])."""
    tokens = tokens.long()[:, None]
    ids = torch.cat((tokens, largest(logits, shown)), dim=-1)
    values = torch.log_softmax(logits, dim=-1).gather(1, ids)
    return _ranks(logits, tokens), ids.cpu().numpy(), values.cpu().numpy()


def _ranks(logits: Tensor, tokens: Tensor) -> npt.NDArray[np.int64]:
    """Ranks int64 [rows] of ``tokens`` [rows, 1]."""
    if logits.device.type != "cpu":
        own = logits.gather(1, tokens)
        lower = torch.arange(logits.shape[1], device=logits.device) < tokens
        ahead = (logits > own) | ((logits == own) & lower)
        return 1 + ahead.sum(dim=-1).cpu().numpy()
    # numpy counts booleans many times faster than torch sums them.
    ranks = np.ones(len(tokens), dtype=np.int64)
    for nth, (row, token) in enumerate(zip(logits.numpy(), tokens[:, 0].tolist(), strict=True)):
        ranks[nth] += np.count_nonzero(row > row[token]) + np.count_nonzero(row[:token] == row[token])
    return ranks


def largest(logits: Tensor, count: int) -> Tensor:
    """Ids of each row's ``count`` largest logits, falling, equals by the lower id: int64 [rows, count]."""
    vocab = logits.shape[1]
    more = min(count + 1, vocab)
    values, ids = logits.topk(more, dim=-1)
    # topk leaves open which of equals it takes: the first that is left out says whether that mattered.
    ids, order = ids[:, :count].sort(dim=-1)
    best, order = values[:, :count].gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    if 0 < count < vocab:
        for row in torch.nonzero(values[:, count] == best[:, -1])[:, 0].tolist():
            ids[row] = logits[row].sort(descending=True, stable=True).indices[:count]
    return ids


def _packed(
    ranks: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], values: npt.NDArray[np.float32], alternatives: Int64Array
) -> list[bytes]:
    """One record a row, each with its own number of alternatives."""
    records = [b""] * len(ranks)
    for shown in np.unique(alternatives).tolist():
        rows, size = np.flatnonzero(alternatives == shown), record_size(shown)
        data = pack_records(ranks[rows], ids[rows, : 1 + shown], values[rows, : 1 + shown], shown)
        for nth, row in enumerate(rows.tolist()):
            records[row] = data[nth * size : (nth + 1) * size]
    return records
