"""What a step cost and what explains it: the five features of the step-time model, and a file of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np

from workers.slots import StepBatch


@dataclass(frozen=True)
class StepFeatures:
    """One step's duration and the counts it is linear in."""

    step_us: int
    prefill_tokens: int
    decode_seqs: int
    sum_ctx_decode: int
    """Context tokens read by the decode rows."""
    sum_chunk_ctx_prefill: int
    """Sum over chunks of chunk length times context length at its end."""

    @staticmethod
    def of(batch: StepBatch, step_us: int) -> StepFeatures:
        """Measure a batch; products are summed in 64 bits."""
        contexts = batch.context_lengths.astype(np.int64)
        chunks = batch.lengths[batch.num_decodes :]
        return StepFeatures(
            step_us=step_us,
            prefill_tokens=int(chunks.sum()),
            decode_seqs=batch.num_decodes,
            sum_ctx_decode=int(contexts[: batch.num_decodes].sum()),
            sum_chunk_ctx_prefill=int((chunks * contexts[batch.num_decodes :]).sum()),
        )


class StepLog:
    """JSON lines, one a step, appended to a file; an empty path logs nothing. Raises OSError when opened in vain."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("ab") if path else None  # noqa: SIM115 - closed by __exit__

    def write(self, step: int, rows: int, ids: int, features: StepFeatures) -> None:
        """Append one line and hand it to the system, so that a killed worker's log is complete."""
        if self._file is not None:
            line = {"step": step, "rows": rows, "ids": ids, **asdict(features)}
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()

    def __enter__(self) -> StepLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
