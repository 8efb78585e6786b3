"""From logits to token ids, batched over the sampling rows of a step.

The order is fixed; a stage whose parameters are neutral changes nothing::

    grammar mask → logit bias, allowed ids, min_tokens → penalties → bad words
        → temperature → min_p → top_k → top_p → argmax of scaled logit + noise

Grammars are not there yet. Temperature 0 is the argmax after the bad words; ties go to the lowest id everywhere.
Logprobs are those of the logits as they come. A row's result depends on its own logits, parameters and tokens alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.worker import RowStatus
from workers import noise
from workers.logit_control import LogitControl
from workers.logprobs import token_records
from workers.sampling import Int64Array, Sampled
from workers.slots import BoolArray, Int32Array, SlotTable

_CANDIDATES = 1024
"""Largest logits looked at before a whole row is sorted."""
_FINALISTS = 8
"""Tokens of the largest rough scores whose exact noise is computed."""
_NOISE_AT_ONCE = 1 << 17
"""Values of noise made at once: they stay in a core's cache."""

Float32Array = npt.NDArray[np.float32]


class SlotSampling:
    """Sampling parameters of every slot as arrays, so that a step gathers them without a loop. All shapes [slots]."""

    def __init__(self, max_slots: int) -> None:
        self.temperature: Float32Array = np.zeros(max_slots, dtype=np.float32)
        self.top_p: Float32Array = np.zeros(max_slots, dtype=np.float32)
        self.min_p: Float32Array = np.zeros(max_slots, dtype=np.float32)
        self.presence: Float32Array = np.zeros(max_slots, dtype=np.float32)
        self.frequency: Float32Array = np.zeros(max_slots, dtype=np.float32)
        self.repetition: Float32Array = np.ones(max_slots, dtype=np.float32)
        self.top_k = np.zeros(max_slots, dtype=np.int64)
        self.min_tokens = np.zeros(max_slots, dtype=np.int64)
        self.seed = np.zeros(max_slots, dtype=np.uint64)
        self.logprobs = np.full(max_slots, -1, dtype=np.int64)

    def fill(self, slots: Int32Array, table: SlotTable) -> None:
        """Take over the parameters of slots that were just added."""
        for slot in slots:
            parameters = table.parameters[slot]
            assert parameters is not None, "an added slot has parameters"
            sampling = parameters.sampling
            self.temperature[slot] = sampling.temperature
            self.top_p[slot], self.top_k[slot], self.min_p[slot] = sampling.top_p, sampling.top_k, sampling.min_p
            self.presence[slot], self.frequency[slot] = sampling.presence_penalty, sampling.frequency_penalty
            self.repetition[slot] = sampling.repetition_penalty
            self.min_tokens[slot] = sampling.min_tokens if parameters.stop_ids.size else 0
            self.seed[slot] = parameters.seed
            self.logprobs[slot] = sampling.logprobs


class Sampler:
    """Draws one id per row."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._slots = SlotSampling(max_slots)
        self._control = LogitControl(max_slots, vocab_size, device)
        self._device = device
        self._tokens = torch.arange(vocab_size, dtype=torch.int32, device=device)

    def add(self, slots: Int32Array, table: SlotTable) -> None:
        """Take over the parameters of slots that were just added."""
        self._slots.fill(slots, table)
        for slot in slots.tolist():
            parameters = table.parameters[slot]
            assert parameters is not None, "an added slot has parameters"
            self._control.fill(slot, parameters.sampling)

    @torch.inference_mode()
    def sample(self, logits: Tensor, slots: Int32Array, positions: Int32Array, table: SlotTable) -> Sampled:
        """Draw for ``slots`` [rows] from ``logits`` fp32 [rows, vocab], which are used up.

        ``positions`` [rows] are the indices the drawn ids will have in their sequences; the table holds the tokens
        before them.
        """
        if not len(slots):
            return Sampled(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint8), [])
        told = np.flatnonzero(self._slots.logprobs[slots] >= 0)
        raw = logits[self._tensor(told)]
        self._control.bias_and_allow(logits, slots)
        self._suppress_early_stops(logits, slots, positions, table)
        self._penalise(logits, slots, positions, table)
        self._control.forbid(logits, slots, positions, table)
        best = logits.argmax(dim=-1)  # the first of equals; of a row with NaN a NaN
        top = logits.gather(1, best[:, None])
        status = _status(top[:, 0])
        rows = np.flatnonzero((self._slots.temperature[slots] > 0) & (status == RowStatus.OK))
        if len(rows):
            chosen = self._tensor(rows)
            scaled = (logits[chosen] - top[chosen]) / self._tensor(self._slots.temperature[slots[rows]])[:, None]
            best[chosen] = self._draw(scaled, slots[rows], positions[rows])
        ids = best.cpu().numpy().astype(np.int32)
        records = [b""] * len(ids)
        if len(told):
            for row, record in zip(
                told, token_records(raw, ids[told], self._slots.logprobs[slots[told]])[0], strict=True
            ):
                records[row] = record
        return Sampled(ids, status, records)

    def token_records(
        self, logits: Tensor, tokens: Int32Array, alternatives: Int64Array
    ) -> tuple[list[bytes], BoolArray]:
        """The record of each row's token, and whether the row's numbers are all right."""
        return token_records(logits, tokens, alternatives)

    def _tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _suppress_early_stops(self, logits: Tensor, slots: Int32Array, positions: Int32Array, table: SlotTable) -> None:
        early = positions - table.prompt_len[slots] < self._slots.min_tokens[slots]
        for row in np.flatnonzero(early):
            parameters = table.parameters[slots[row]]
            assert parameters is not None, "a sampling slot has parameters"
            ids = parameters.stop_ids[parameters.stop_ids < logits.shape[1]]
            logits[row, self._tensor(ids.astype(np.int64))] = -torch.inf

    def _penalise(self, logits: Tensor, slots: Int32Array, positions: Int32Array, table: SlotTable) -> None:
        """OpenAI's presence and frequency over the output, then CTRL's repetition over prompt and output before them.

        In vLLM's order: repetition first. What a resumed sequence brought beyond its prompt is output.
        """
        state = self._slots
        repetition, frequency, presence = state.repetition[slots], state.frequency[slots], state.presence[slots]
        rows = np.flatnonzero((repetition != 1) | (frequency != 0) | (presence != 0))
        if not len(rows):
            return
        seen = [
            _token_counts(table.tokens[slots[row], : positions[row]], int(table.prompt_len[slots[row]])) for row in rows
        ]
        row = np.repeat(rows, [len(ids) for ids, _ in seen])
        ids, counts = np.concatenate([each[0] for each in seen]), np.concatenate([each[1] for each in seen])
        at = (self._tensor(row), self._tensor(ids))
        values = logits[at]
        factor = self._tensor(repetition[row])
        values = torch.where(values > 0, values / factor, values * factor)
        values = values - self._tensor(frequency[row] * counts.astype(np.float32))
        logits[at] = values - self._tensor(presence[row] * (counts > 0).astype(np.float32))

    def _draw(self, scaled: Tensor, slots: Int32Array, positions: Int32Array) -> Tensor:
        """Ids int64 [rows] from scaled logits [rows, vocab], whose largest are 0."""
        state = self._slots
        min_p = state.min_p[slots]
        if (min_p > 0).any():
            with np.errstate(divide="ignore"):
                floor = np.log(min_p)
            scaled = scaled.masked_fill(scaled < self._tensor(floor)[:, None], -torch.inf)
        keys = self._tensor(noise.keys(state.seed[slots], positions.astype(np.int64)))
        top_k, top_p = state.top_k[slots], state.top_p[slots]
        cut: BoolArray = ((top_k > 0) & (top_k < scaled.shape[1])) | (top_p < 1)
        ids = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        whole = np.flatnonzero(~cut)
        if len(whole):
            rows = self._tensor(whole)
            ids[rows] = _draw_from_all(scaled[rows], keys[rows], self._tokens)
        some = np.flatnonzero(cut)
        if len(some):
            rows = self._tensor(some)
            ids[rows] = _draw_from_top(scaled[rows], keys[rows], top_k[some], top_p[some])
        return ids


def _draw_from_all(scaled: Tensor, keys: Tensor, tokens: Tensor) -> Tensor:
    """Draw from whole rows; ids int64 [rows].

    The exact noise costs some fifty passes over the vocabulary, so a rough one picks finalists and the exact one
    decides between them. Where a margin cannot rule the others out, the exact noise is taken for all.
    """
    drawn = []
    at_once = max(1, _NOISE_AT_ONCE // scaled.shape[1])
    finalists = min(_FINALISTS, scaled.shape[1])
    for part, part_keys in zip(torch.split(scaled, at_once), torch.split(keys, at_once), strict=True):
        u = noise.uniform(part_keys, tokens)
        rough, ids = noise.rough_gumbel(u.clone()).add_(part).topk(finalists, dim=-1)
        best = _lowest_of_best(part.gather(1, ids) + noise.gumbel(u.gather(1, ids)), ids)
        if finalists < scaled.shape[1]:
            for row in torch.nonzero(rough[:, -1] >= rough[:, 0] - 2 * noise.ROUGHNESS)[:, 0].tolist():
                best[row] = (part[row] + noise.gumbel(u[row])).argmax()
        drawn.append(best)
    return torch.cat(drawn)


def _draw_from_top(scaled: Tensor, keys: Tensor, top_k: npt.NDArray[np.int64], top_p: Float32Array) -> Tensor:
    """Draw from the top_k and top_p of each row; all [rows, …].

    Looks at the largest logits only, and sorts whole the rows for which those do not settle the support.
    """
    vocab = scaled.shape[1]
    device = scaled.device
    most = torch.from_numpy(np.where((top_k > 0) & (top_k < vocab), top_k, vocab)).to(device)
    mass = torch.from_numpy(top_p).to(device)
    candidates = min(_CANDIDATES, vocab)
    values, ids = _ordered(*scaled.topk(candidates, dim=-1))
    kept, settled = _support(values, scaled, most, mass)
    drawn = _best(values, ids, kept, keys)
    if candidates < vocab:
        for row in torch.nonzero(~settled)[:, 0].tolist():
            one = slice(row, row + 1)
            values, ids = scaled[one].sort(dim=-1, descending=True, stable=True)
            kept, _ = _support(values, scaled[one], most[one], mass[one])
            drawn[one] = _best(values, ids, kept, keys[one])
    return drawn


def _ordered(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """By value downwards, equals by id upwards."""
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _support(values: Tensor, scaled: Tensor, most: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the ordered ``values`` [rows, n] are kept, and whether what lies beyond them could matter [rows].

    A token is kept while it is among the ``most`` largest and those before it have less than ``mass`` of the
    probability that all of these have together. The first is always kept.
    """
    count, vocab = values.shape[1], scaled.shape[1]
    rank = torch.arange(count, device=values.device)
    ranked = rank < most[:, None]
    weights = values.double().exp().masked_fill(~ranked, 0.0)
    total = torch.where(most < vocab, weights.sum(dim=-1), scaled.double().exp().sum(dim=-1))
    before = weights.cumsum(dim=-1) - weights
    within = (mass >= 1)[:, None] | (before < (mass * total)[:, None])
    kept = ranked & within & (values > -torch.inf)
    kept[:, 0] = True
    # Beyond the last candidate lie smaller or equal values: they cannot matter when nothing equal to it is kept, and
    # the total is known.
    last = values[:, -1:]
    reaches_end = (kept & (values == last)).any(dim=-1)
    settled = ~reaches_end & ((most <= count) | (most == vocab))
    return kept, settled


def _best(values: Tensor, ids: Tensor, kept: Tensor, keys: Tensor) -> Tensor:
    """Argmax of value + noise over what is kept."""
    scores = noise.gumbel(noise.uniform(keys, ids.to(torch.int32))).add_(values)
    return _lowest_of_best(scores.masked_fill_(~kept, -torch.inf), ids)


def _lowest_of_best(scores: Tensor, ids: Tensor) -> Tensor:
    """The id of each row's largest score, the lowest of equals: [rows, n], [rows, n] → [rows]."""
    winners = scores == scores.amax(dim=-1, keepdim=True)
    return ids.masked_fill(~winners, torch.iinfo(ids.dtype).max).amin(dim=-1)


def _token_counts(tokens: Int32Array, prompt_len: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Distinct ids of a sequence and how often each is in the output part."""
    ids, where = np.unique(tokens, return_inverse=True)
    return ids.astype(np.int64), np.bincount(where[prompt_len:], minlength=len(ids))


def _status(top: Tensor) -> npt.NDArray[np.uint8]:
    """Status by a row's largest logit, [rows] → [rows]."""
    values = top.cpu().numpy()
    status = np.full(len(values), RowStatus.OK, dtype=np.uint8)
    status[np.isnan(values) | np.isposinf(values)] = RowStatus.NAN
    status[np.isneginf(values)] = RowStatus.EMPTY_SUPPORT
    return status
