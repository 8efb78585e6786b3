"""Fit the step-time model to worker step logs: ``python -m bench.simulation.fit STEP_LOG … [--out FILE]``.

A worker writes one with ``--step-log FILE``. Least squares without negative coefficients, over relative errors, because
a short step that is 2 ms off is a worse prediction than a long one. With five features every subset is tried, so the
optimum is exact. The file is what ``headrace serve --engine simulated --engine-script FILE`` takes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from workers.simulated import StepTimes

FEATURES = ("prefill_tokens", "decode_seqs", "sum_ctx_decode", "sum_chunk_ctx_prefill")
WARM_UP = 5
"""First steps of a log, which say more about caches than about the model."""

KEPT = 0.9
"""Share of the steps that is fitted in the end."""
TRIMS = 2

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Fit:
    """Coefficients, and how far off they are on the steps they were fitted to."""

    times: StepTimes
    steps: int
    median_error: float
    """Relative, of one step."""
    p90_error: float


def read_log(path: Path) -> Float64Array:
    """[steps, 5]: step_us and the four features."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return np.array([[row["step_us"], *(row[name] for name in FEATURES)] for row in rows[WARM_UP:]], dtype=float)


def fit(steps: Float64Array, ids_per_row: int = 1) -> Fit:
    """The best coefficients of at least 0 for steps as ``read_log`` gives them.

    The tenth that fits worst is left out and the rest fitted again: now and then a machine does something else.
    """
    measured, features = steps[:, 0], np.column_stack((np.ones(len(steps)), steps[:, 1:]))
    chosen = np.arange(len(steps))
    for _ in range(TRIMS):
        best = _solve(features[chosen] / measured[chosen, None])
        errors = np.abs(features @ best / measured - 1.0)
        chosen = np.sort(errors.argsort()[: max(5, int(len(steps) * KEPT))])
    best = _solve(features[chosen] / measured[chosen, None])
    errors = np.abs(features @ best / measured - 1.0)
    c0, c1, c2, c3, c4 = (float(np.format_float_positional(value, 5, fractional=False)) for value in best)
    times = StepTimes(c0=c0, c1=c1, c2=c2, c3=c3, c4=c4, ids_per_row=ids_per_row)
    return Fit(times, len(steps), float(np.median(errors)), float(np.percentile(errors, 90)))


def _solve(weighted: Float64Array) -> Float64Array:
    """Coefficients whose predictions are nearest to 1, [5]; rows are features over the measured time."""
    best, least, ones = np.zeros(5), np.inf, np.ones(len(weighted))
    for count in range(1, 6):
        for columns in map(list, combinations(range(5), count)):
            solved = np.linalg.lstsq(weighted[:, columns], ones, rcond=None)[0]
            error = float(((weighted[:, columns] @ solved - 1.0) ** 2).sum())
            if (solved >= 0).all() and error < least:
                best, least = np.zeros(5), error
                best[columns] = solved
    return best


def main() -> None:
    """Fit, print, and write when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="file for the coefficients")
    given = parser.parse_args()
    fitted = fit(np.concatenate([read_log(path) for path in given.logs]))
    print(f"{fitted.steps} steps, error of a step: median {fitted.median_error:.1%}, p90 {fitted.p90_error:.1%}")
    encoded = msgspec.json.format(msgspec.json.encode(fitted.times), indent=2)
    print(encoded.decode())
    if given.out:
        given.out.write_bytes(encoded + b"\n")


if __name__ == "__main__":
    main()
