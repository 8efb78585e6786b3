"""Fail when a test whose name holds a word was skipped, or when there is none. Usage: not_skipped.py REPORT.xml WORD"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree


def main(report: str, word: str) -> int:
    cases = [case for case in ElementTree.parse(report).iter("testcase") if word in case.get("name", "")]
    skipped = [case for case in cases if case.find("skipped") is not None]
    for case in skipped:
        reason = case.find("skipped")
        assert reason is not None
        sys.stderr.write(f"{case.get('classname')}::{case.get('name')} was skipped: {reason.get('message')}\n")
    if not cases:
        sys.stderr.write(f"no test has {word!r} in its name\n")
    return 1 if skipped or not cases else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
