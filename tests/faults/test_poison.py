"""A request that kills every process it runs in, beside others that lose nothing but time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.end_to_end.serve_process import ServeProcess
from tests.faults.ledger import Ask, Ledger, Verdict, follow_all
from tests.faults.scenarios import mixed_asks, script

pytestmark = pytest.mark.slow

STREAMS = 12
POISON = '{"match": {"prompt_contains": "poison"}, "text": "never", "fault": {"at_index": 3, "kind": "exit"}}\n'


def test_a_poison_request_gets_one_error_and_the_others_every_token(tmp_path: Path) -> None:
    (tmp_path / "script.jsonl").write_text(POISON + script(STREAMS, delay_ms=10))
    arguments = ["--launcher", "local", "--groups", "2", "--engine", "scripted", "--tokenizer", "byte"]
    with ServeProcess(*arguments, "--engine-script", str(tmp_path / "script.jsonl")) as server:
        server.wait_for_groups(2)
        model = server.client().models.list().data[0].id
        asks = mixed_asks(model, STREAMS, max_tokens=40)
        undisturbed, disturbed = [Ledger(ask) for ask in asks], [Ledger(ask) for ask in asks]
        asyncio.run(follow_all(server.url, undisturbed))
        body = {"model": model, "messages": [{"role": "user", "content": "poison"}], "stream": True}
        poison = Ledger(Ask("poison", "/v1/chat/completions", body))
        asyncio.run(follow_all(server.url, [*disturbed[:6], poison, *disturbed[6:]]))
        verdicts = [ledger.verdict(whole, []) for ledger, whole in zip(disturbed, undisturbed, strict=True)]
        assert verdicts == [Verdict.EXACT] * STREAMS
        assert poison.error is not None and poison.error["type"] == "server_error", poison
        again = Ledger(Ask("poison again", "/v1/chat/completions", {**body, "stream": False}))
        groups = sorted(server.pids("headrace worker-rank"))
        asyncio.run(follow_all(server.url, [again]))
        assert again.status == 500 and again.error is not None, "the prompt is in quarantine"
        server.wait_for_groups(2)
        assert sorted(server.pids("headrace worker-rank")) == groups, "and cost no group"
