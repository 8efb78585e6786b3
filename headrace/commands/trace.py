"""``headrace trace FILE``: what a scheduler did, from the ring that it wrote on SIGUSR1."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from protocol.packing import unpack_u32
from scheduler.trace import TraceError, TraceHeader, read_trace, replay
from scheduler.trace_events import Done, Entry, Framed, Planned, Submitted

DESCRIPTION = """\
Read a trace: the last steps of a scheduler, which it writes when it gets SIGUSR1 (see --trace-memory and --trace-dir).
It holds prompts and answers as token ids: treat it as you would treat them.
"""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "headrace trace", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--steps", action="store_true", help="one line for every event and plan")
    parser.add_argument("--replay", action="store_true", help="let it happen again to a fresh scheduler, and compare")
    given = parser.parse_args(arguments)
    try:
        header, entries = read_trace(given.file)
        if given.replay:
            sent = sum(1 for _ in replay(header, entries))
            sys.stdout.write(f"replayed: {header.entries} entries, {sent} messages, every plan and frame the same\n")
        else:
            _show(header, list(entries), steps=given.steps)
    except (TraceError, OSError) as error:
        sys.stderr.write(f"headrace trace: {error}\n")
        return 1
    return 0


def _show(header: TraceHeader, entries: list[Entry], *, steps: bool) -> None:
    if steps:
        for entry in entries:
            sys.stdout.write(_line(entry) + "\n")
    kinds = Counter(type(entry).__name__ for entry in entries)
    times = [entry.now for entry in entries if isinstance(entry, Done)]
    whole = "from the start" if not header.lost else f"{header.lost} older entries lost"
    sys.stdout.write(f"written {header.written}, epoch {header.epoch:x}, {header.entries} entries, {whole}\n")
    if times:
        sys.stdout.write(f"{len(times)} steps in {times[-1] - times[0]:.3f} s\n")
    for name, count in kinds.most_common():
        sys.stdout.write(f"  {name:<16}{count}\n")


def _line(entry: Entry) -> str:
    """One entry in a line, without ids."""
    if isinstance(entry, Planned):
        plan = entry.message()
        chunks = unpack_u32(plan.chunks, 2)[:, 1].sum() if plan.chunks else 0
        return (
            f"{'':14}plan of session {entry.session}, step {plan.step}: {len(plan.drops) // 4} dropped, "
            f"{len(plan.adds)} added, {len(plan.blocks) // 8} blocks, {chunks} prefill tokens, "
            f"{len(plan.skips) // 4} skipped"
        )
    if isinstance(entry, Framed):
        return f"{'':14}frames of group {entry.group}, step {entry.step}: {entry.rows} rows"
    if isinstance(entry, Done):
        done = entry.message
        return (
            f"{entry.now:<14.6f}step {done.step} of session {entry.session} done: {len(done.counts)} rows, "
            f"{len(done.ids) // 4} ids, {done.step_us} us"
        )
    if isinstance(entry, Submitted):
        submit = entry.message
        rids = ", ".join(str(choice.rid) for choice in submit.choices)
        return (
            f"{entry.now:<14.6f}submit of session {entry.session}: rid {rids}, {len(submit.tokens) // 4} tokens, "
            f"at most {submit.max_tokens}"
        )
    return f"{'':14}{entry}"[:160]
