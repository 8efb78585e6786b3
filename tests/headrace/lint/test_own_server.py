"""The whole contract against this project's own server: all its processes, an engine whose answers are written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.lint.areas import all_checks
from headrace.lint.runner import find_target, run_checks
from headrace.lint.session import Target
from headrace.lint.verdicts import Verdict
from headrace.lint.wire import Address
from tests.end_to_end.serve_process import serving

TEXT = "One 🦦, two 👩‍🚀 客单价 é five\n\nsix  seven eight nine ten 🇳🇴. The end é."
KEY = "a-key-of-the-lint"

NOT_OFFERED = ("features", "routes/later", "fields/synonym: thinking", "routes/metrics", "every reply/retry-after")
"""What is not built yet, what only an admin key opens, and what no reply concerned."""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nothing_is_wrong_with_our_own_server(tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"text": TEXT, "step_sizes": [1, 3, 2, 8]}) + "\n", encoding="utf-8")
    engine = ("--launcher", "local", "--engine", "scripted", "--engine-script", str(script), "--tokenizer", "byte")
    with serving(*engine, environment={"HEADRACE_API_KEY": KEY}) as server:
        target = find_target(Target(Address.of(server.url), "", KEY))
        outcomes = run_checks(target, all_checks(), concurrency=4)
    wrong = {outcome.check.title: outcome.why for outcome in outcomes if outcome.verdict is Verdict.WRONG}
    assert wrong == {}
    missing = {outcome.check.title: outcome.why for outcome in outcomes if outcome.verdict is Verdict.NOT_OFFERED}
    unexplained = {
        title: why
        for title, why in missing.items()
        if not title.startswith(NOT_OFFERED)
        and "the same at any temperature" not in why
        and "nothing is cached" not in why
    }
    assert unexplained == {}
