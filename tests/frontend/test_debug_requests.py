"""GET /debug/requests/{id}: there for admins alone, under either id of a request, with the scheduler's part."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from frontend.http.app import create_app
from frontend.http.keys import Caller, KeyRing, digest_of
from frontend.journal import MOST_KEPT, Journal
from protocol.frontend import Phase, RejectCode, Span, Timeline
from tests.frontend.fake_scheduler import Script
from tests.frontend.harness import CHAT, Bench, chat

ADMIN = {"authorization": "Bearer sk-admin"}
USER = {"authorization": "Bearer sk-user"}
RING = KeyRing({digest_of(b"sk-user"): Caller("user"), digest_of(b"sk-admin"): Caller("boss", admin=True)}, "key")
NO_ADMIN = KeyRing({digest_of(b"sk-user"): Caller("user")}, "key")


def client_of(here: Bench, ring: KeyRing | None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(here.frontend, ring), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://bench")


async def test_without_an_admin_key_there_is_no_such_route(here: Bench) -> None:
    for ring in (None, NO_ADMIN):
        async with client_of(here, ring) as client:
            response = await client.get("/debug/requests/x", headers=USER)
            assert response.status_code == 404 and response.json()["error"]["code"] == "route_not_found"


async def test_only_an_admin_key_opens_it(here: Bench) -> None:
    async with client_of(here, RING) as client:
        assert (await client.get("/debug/requests/x")).status_code == 401
        refused = await client.get("/debug/requests/x", headers=USER)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_key_required"
        unknown = await client.get("/debug/requests/x", headers=ADMIN)
        assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "request_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answered_request_is_found_by_either_id(here: Bench, stream: bool) -> None:
    timeline = Timeline(
        1,
        9000,
        8000,
        Phase.ENDED,
        1000,
        2000,
        5000,
        20,
        16,
        3,
        2,
        1,
        0,
        "stop",
        "",
        (Span(Phase.DECODE, "g", 3000, 5000),),
    )
    here.scheduler.timelines = {1: timeline}
    async with client_of(here, RING) as client:
        headers = {**USER, "x-request-id": "mine-1"}
        answered = await client.post(CHAT, json=chat(stream=stream), headers=headers)
        assert answered.status_code == 200
        first = answered.text.splitlines()[0].removeprefix("data: ") if stream else answered.text
        ids = ["mine-1", httpx.Response(200, text=first).json()["id"]]
        reports = [(await client.get(f"/debug/requests/{name}", headers=ADMIN)).json() for name in ids]
    assert reports[0] == reports[1]
    report, told = reports[0]["here"], reports[0]["choices"][0]
    assert (reports[0]["id"], reports[0]["request_id"]) == (ids[1], "mine-1")
    assert report["outcome"] == "answered"
    marks = [report[f"{name}_ms"] for name in ("read", "prepared", "submitted", "first_token", "ended")]
    assert marks == sorted(marks) and marks[0] >= 0
    assert (report["first_written_ms"] is not None) is stream
    assert (told["queued_ms"], told["prefill_ms"], told["decode_ms"], told["lasted_ms"]) == (1, 2, 5, 8)
    assert (told["cached_tokens"], told["preemptions"], told["starts"], told["ended"]) == (16, 1, 2, "stop")
    assert told["spans"] == [{"phase": "decode", "group": "g", "at_ms": 3, "ms": 5}]


async def test_a_request_under_way_is_told_as_far_as_it_is(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("ok", gate=1)
    async with client_of(here, RING) as client:
        headers = {**USER, "x-request-id": "slow"}
        asking = asyncio.create_task(client.post(CHAT, json=chat(), headers=headers))
        await here.until_here(lambda: (one := here.frontend.journal.find("slow")) and one.first_token > 0, "a token")
        report = (await client.get("/debug/requests/slow", headers=ADMIN)).json()
        here.scheduler.open_gates()
        await asking
    assert report["here"]["outcome"] == "" and report["here"]["ended_ms"] is None and len(report["choices"]) == 1


async def test_a_request_that_was_refused_says_why(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script(reject=RejectCode.OVERLOADED)
    async with client_of(here, RING) as client:
        refused = await client.post(CHAT, json=chat(), headers={**USER, "x-request-id": "refused"})
        report = (await client.get("/debug/requests/refused", headers=ADMIN)).json()
    assert report["here"]["outcome"] == refused.json()["error"]["code"]


async def test_a_stream_that_broke_off_and_a_body_that_was_bad_say_why(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("okay", fault_at=2)
    async with client_of(here, RING) as client:
        await client.post(CHAT, json=chat(stream=True), headers={**USER, "x-request-id": "broken"})
        await client.post(CHAT, json=chat(temperature=9), headers={**USER, "x-request-id": "bad"})
        broken, bad = [(await client.get(f"/debug/requests/{one}", headers=ADMIN)).json() for one in ("broken", "bad")]
    assert broken["here"]["outcome"] == "engine_error" and broken["here"]["first_written_ms"] is not None
    assert bad["here"]["outcome"] == "invalid_value" and bad["here"]["read_ms"] is None and bad["choices"] == []


async def test_a_choice_that_the_scheduler_forgot_is_null(here: Bench) -> None:
    async with client_of(here, RING) as client:
        await client.post(CHAT, json=chat(n=2), headers={**USER, "x-request-id": "two"})
        report = (await client.get("/debug/requests/two", headers=ADMIN)).json()
    assert report["choices"] == [None, None]


def test_the_journal_is_bounded_and_keeps_those_that_live() -> None:
    journal = Journal()
    living = journal.begin("chatcmpl", 0.0)
    living.id = "alive"
    for _ in range(2 * MOST_KEPT):
        journal.begin("chatcmpl", 0.0).end("answered")
    assert len(journal) == MOST_KEPT and journal.find("alive") is living
