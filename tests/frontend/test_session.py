"""The session with the scheduler: held requests, losses, gaps, and what is refused."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from protocol.frontend import Credit, Drain, Finish, FinishReason, Frame, GroupLoad, Load, ModelDown, RejectCode, Submit
from protocol.packing import pack_u8, pack_u32, pack_u64
from tests.frontend.fake_scheduler import GROUP, NUMERICS, FakeScheduler, Script
from tests.frontend.harness import CHAT, MODEL, Bench, bench, chat

TEXT = "One 世界 👩‍👩‍👧 two END three"


def resumed(scheduler: FakeScheduler) -> list[int]:
    """How many ids each Submit so far carried as received."""
    return [len(choice.resume) // 4 for submit in scheduler.submits for choice in submit.choices]


async def answer(made: Bench, **fields: object) -> tuple[str, dict[str, object]]:
    response = await made.post(CHAT, chat(**fields))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"], response.json()["usage"]


@pytest.mark.parametrize("gate", [0, 1, 5, 9, 20])
@pytest.mark.parametrize("fields", [{}, {"stop": ["END"]}])
async def test_a_lost_session_costs_a_pause_and_nothing_else(here: Bench, gate: int, fields: dict[str, object]) -> None:
    here.scheduler.script = lambda submit: Script.text(TEXT, cached=2)
    expected = await answer(here, **fields)
    here.scheduler.script = lambda submit: Script.text(TEXT, gate=gate, cached=2 + len(here.scheduler.submits))
    task = asyncio.create_task(answer(here, **fields))
    scheduler = here.scheduler
    await here.until(lambda: any(job.position == gate for job in scheduler.jobs.values()), "at the gate")
    scheduler.restart()
    await here.until(lambda: len(scheduler.submits) == 3, "submitted again")
    scheduler.open_gates()
    text, usage = await task
    assert (text, usage["completion_tokens"]) == (expected[0], expected[1]["completion_tokens"])
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}, "what was cached is kept from the first time"
    first, again = scheduler.submits[1], scheduler.submits[2]
    assert resumed(scheduler) == [0, 0, gate]
    assert again.choices[0].seed == first.choices[0].seed and again.choices[0].rid != first.choices[0].rid
    assert msgspec.structs.replace(again, choices=()) == msgspec.structs.replace(first, choices=())


async def test_nothing_is_submitted_again_before_the_model_is_registered_again(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text(TEXT, gate=3)
    task = asyncio.create_task(answer(here))
    await here.until(lambda: len(here.scheduler.jobs) == 1, "submitted")
    here.scheduler.restart(registered=False)
    await here.until(lambda: here.scheduler.sessions == 2, "a second session")
    here.scheduler.open_gates()
    here.scheduler.register()
    assert (await task)[0] == TEXT


async def test_a_gap_is_closed_by_submitting_again(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text(TEXT, steps=(3,), skip_frame_at=6)
    assert (await answer(here))[0] == TEXT
    rid = here.scheduler.submits[0].choices[0].rid
    assert resumed(here.scheduler)[0] == 0 and resumed(here.scheduler)[1] == 6
    classes = [choice.numerics for submit in here.scheduler.submits for choice in submit.choices]
    assert classes[:2] == [b"", NUMERICS], "it goes on in the class that its ids come from"
    await here.until(lambda: rid in here.scheduler.aborted, "the choice with the gap aborted")
    assert here.frontend.client.statistics().resubmitted == {"gap": 1}


async def test_a_finish_that_came_without_its_ids_is_asked_for_again(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text(TEXT, steps=(8,), skip_frame_at=32)
    text, usage = await answer(here)
    assert text == TEXT and usage["completion_tokens"] == len(TEXT.encode()) + 1


async def test_a_scheduler_that_keeps_losing_ids_is_not_asked_for_ever(here: Bench) -> None:
    def script(submit: Submit) -> Script:
        finish = Finish(submit.choices[0].rid, FinishReason.LENGTH, 99)
        here.scheduler.broadcast(Frame(GROUP, 1, finishes=(finish,)))
        return Script()

    here.scheduler.script = script
    response = await here.post(CHAT, chat())
    assert response.status_code == 500 and response.json()["error"]["code"] == "engine_error"
    assert len(here.scheduler.submits) == 9


async def test_ids_sent_twice_count_once(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("abcdef", gate=4)
    task = asyncio.create_task(answer(here))
    await here.until(lambda: any(job.position == 4 for job in here.scheduler.jobs.values()), "at the gate")
    rid = here.scheduler.submits[0].choices[0].rid
    again = Frame(GROUP, 9, pack_u64([rid]), pack_u32([2]), pack_u8([3]), pack_u32(b"cde"))
    here.scheduler.broadcast(again)
    await here.until_here(lambda: open_ids(here) == [5], "the new one of the three taken")
    here.scheduler.open_gates()
    assert (await task)[0] == "abcdef"


def open_ids(made: Bench) -> list[int]:
    return [len(feed.ids) for feed in made.frontend.client.open_feeds()]


async def test_frames_that_contradict_themselves_are_counted_and_harm_nobody(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("abc", gate=1)
    task = asyncio.create_task(answer(here))
    await here.until(lambda: any(job.position == 1 for job in here.scheduler.jobs.values()), "at the gate")
    rid = here.scheduler.submits[0].choices[0].rid
    for bad in (
        Frame(GROUP, 1, b"1234567"),
        Frame(GROUP, 1, pack_u64([rid]), pack_u32([1]), pack_u8([2]), pack_u32([1])),
        Frame(GROUP, 1, pack_u64([rid]), pack_u32([]), pack_u8([1]), pack_u32([1])),
    ):
        here.scheduler.broadcast(bad)
    unknown = Frame(GROUP, 1, pack_u64([77]), pack_u32([0]), pack_u8([1]), pack_u32([1]))
    here.scheduler.broadcast(unknown)
    here.scheduler.broadcast(Frame(GROUP, 1, finishes=(Finish(78, FinishReason.STOP, 0),)))
    await here.until_here(lambda: here.frontend.client.statistics().frames_malformed == 3, "three counted")
    here.scheduler.open_gates()
    assert (await task)[0] == "abc"


async def test_a_choice_under_way_waits_out_a_full_queue(here: Bench) -> None:
    scheduler = here.scheduler
    scheduler.script = lambda submit: Script.text("abcdef", gate=3)
    task = asyncio.create_task(answer(here))
    await here.until(lambda: any(job.position == 3 for job in scheduler.jobs.values()), "at the gate")
    scheduler.script = lambda submit: Script(reject=RejectCode.OVERLOADED, retry_after_ms=1)
    scheduler.restart()
    await here.until(lambda: len(scheduler.submits) >= 3, "refused and asked again")
    scheduler.script = lambda submit: Script.text("abcdef")
    assert (await task)[0] == "abcdef"


async def test_requests_are_held_until_the_model_is_there(tmp_path, artefacts) -> None:
    async with bench(tmp_path, artefacts, registered=False) as made:
        tasks = [asyncio.create_task(made.post(CHAT, chat(stream=stream))) for stream in (False, True)]
        await made.until_here(lambda: made.frontend.preparing == 2, "both held")
        card = (await made.client.get(f"/v1/models/{MODEL}")).json()
        assert card["status"] == "loading" and made.scheduler.submits == []
        assert (await made.client.get("/readyz")).status_code == 200
        made.scheduler.register()
        assert [(await task).status_code for task in tasks] == [200, 200]
        card = (await made.client.get(f"/v1/models/{MODEL}")).json()
        assert (card["status"], card["max_model_len"]) == ("ready", 1000)


async def test_held_requests_are_refused_after_the_grace(tmp_path, artefacts) -> None:
    async with bench(tmp_path, artefacts, registered=False, scheduler_grace=0.05) as made:
        response = await made.post(CHAT, chat())
        assert response.status_code == 503 and response.json()["error"]["code"] == "unavailable"
        assert response.headers["retry-after"]


async def test_a_scheduler_away_for_too_long_ends_what_is_open_and_readiness(tmp_path, artefacts) -> None:
    async with bench(tmp_path, artefacts, scheduler_grace=0.2) as made:
        made.scheduler.script = lambda submit: Script.text(TEXT, gate=3)
        task = asyncio.create_task(made.post(CHAT, chat()))
        await made.until(lambda: len(made.scheduler.jobs) == 1, "submitted")
        made.scheduler.mute()
        made.scheduler.restart()
        response = await task
        assert response.status_code == 503 and response.json()["error"]["code"] == "unavailable"
        await made.until_here(lambda: made.frontend.not_ready_because(), "not ready")
        assert (await made.client.get("/health")).status_code == 503
        assert (await made.post(CHAT, chat())).status_code == 503
        assert (await made.client.get("/livez")).status_code == 200


async def test_a_frontend_is_not_ready_before_its_first_session(tmp_path, artefacts) -> None:
    async with bench(tmp_path, artefacts, in_session=False) as made:
        response = await made.client.get("/readyz")
        assert response.status_code == 503 and "no session" in response.json()["error"]["message"]


async def test_another_tokenizer_is_refused_and_both_digests_are_named(here: Bench) -> None:
    theirs, ours = b"\x01" * 16, here.frontend.artefacts.tokenizer_digest()
    here.scheduler.register(msgspec.structs.replace(here.scheduler.model, tokenizer_digest=theirs))
    await here.until_here(lambda: here.frontend.client.status == "unavailable", "refused")
    response = await here.post(CHAT, chat())
    message = response.json()["error"]["message"]
    assert response.status_code == 503 and theirs.hex() in message and ours.hex() in message
    assert (await here.client.get("/health")).status_code == 503
    here.scheduler.register(msgspec.structs.replace(here.scheduler.model, tokenizer_digest=ours))
    await here.until_here(lambda: here.frontend.client.status == "ready", "taken back")
    assert (await here.post(CHAT, chat())).status_code == 200


async def test_a_model_without_a_ready_group_is_listed_and_still_takes_requests(here: Bench) -> None:
    here.scheduler.broadcast(ModelDown(MODEL, "its group died"))
    await here.until_here(lambda: here.frontend.client.status == "unavailable", "down")
    cards = (await here.client.get("/v1/models")).json()["data"]
    assert [(card["id"], card["status"]) for card in cards] == [(MODEL, "unavailable"), ("alias", "unavailable")]
    assert (await here.post(CHAT, chat())).status_code == 200


async def test_a_model_without_a_ready_group_for_too_long_ends_readiness(tmp_path, artefacts) -> None:
    """Whatever the reason: its last group died, or none ever came."""
    async with bench(tmp_path, artefacts, scheduler_grace=0.05) as made:
        made.scheduler.broadcast(ModelDown(MODEL, "its group is frozen"))
        await made.until_here(lambda: made.frontend.not_ready_because(), "not ready")
        for path in ("/health", "/readyz"):
            response = await made.client.get(path)
            assert response.status_code == 503 and "no group" in response.json()["error"]["message"]
        assert (await made.client.get("/livez")).status_code == 200
        made.scheduler.register()
        await made.until_here(lambda: not made.frontend.not_ready_because(), "ready again")
        assert (await made.client.get("/health")).status_code == 200
    async with bench(tmp_path, artefacts, scheduler_grace=0.05, registered=False) as made:
        await made.until_here(lambda: made.frontend.not_ready_because(), "not ready")


async def test_other_models_of_the_cell_are_none_of_this_frontends_business(here: Bench) -> None:
    model = here.scheduler.model
    here.scheduler.register(msgspec.structs.replace(model, name="other", tokenizer_digest=b"x" * 16))
    here.scheduler.register(msgspec.structs.replace(model, context=999))
    await here.until_here(lambda: here.frontend.client.model.context == 999, "the update known")
    assert here.frontend.client.status == "ready"


async def test_credit_falls_with_each_submit_until_the_scheduler_says_more(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("abc", gate=0)
    here.scheduler.broadcast(Load(Credit(2, 10_000), 0, 0, 0, 0, ()))
    await here.until_here(lambda: here.frontend.client.load is not None, "the load known")
    tasks = [asyncio.create_task(here.post(CHAT, chat())) for _ in range(2)]
    await here.until(lambda: len(here.scheduler.submits) == 2, "both submitted")
    assert (await here.post(CHAT, chat())).status_code == 429
    here.scheduler.open_gates()
    assert [(await task).status_code for task in tasks] == [200, 200]
    here.scheduler.broadcast(Load(Credit(9, 10_000), 0, 0, 0, 0, ()))
    await here.until_here(lambda: here.frontend.client.load.credit.requests == 9, "more credit")
    assert (await here.post(CHAT, chat())).status_code == 200


async def test_the_schedulers_gauges_come_out_on_metrics(here: Bench) -> None:
    group = GroupLoad(GROUP, MODEL, True, 100, 30, 20, 5, 0, 2, 700, 900, 40, 2_500_000)
    here.scheduler.broadcast(Load(Credit(9, 9), 5, 4, 321, 6, (group,)))
    await here.until_here(lambda: here.frontend.client.load is not None, "the load known")
    lines = (await here.client.get("/metrics")).text.splitlines()
    for line in (
        'headrace_kv_blocks{group="group-0",state="used"} 30.0',
        'headrace_kv_blocks{group="group-0",state="free"} 50.0',
        'headrace_kv_blocks{group="group-0",state="cached"} 20.0',
        "headrace_requests_running 5.0",
        "headrace_requests_waiting 4.0",
        "headrace_queue_tokens 321.0",
        'headrace_preemptions_total{group="group-0"} 2.0',
        'headrace_step_seconds_total{group="group-0"} 2.5',
        'headrace_zmq_frames_dropped_total{cause="undecodable",socket="scheduler"} 6.0',
    ):
        assert line in lines


async def test_finishes_started_and_in_flight_add_up(here: Bench) -> None:
    for _ in range(3):
        await answer(here)
    await here.post(CHAT, chat(temperature=-1))
    text = (await here.client.get("/metrics")).text
    assert 'headrace_request_success_total{finish_reason="stop"} 3.0' in text
    assert 'headrace_http_requests_total{code="200",route="/v1/chat/completions"} 3.0' in text
    assert 'headrace_http_requests_total{code="400",route="/v1/chat/completions"} 1.0' in text
    assert 'headrace_request_errors_total{code="invalid_value"} 1.0' in text
    assert "headrace_open_choices 0.0" in text and "headrace_http_inflight 1.0" in text


async def test_a_draining_scheduler_lets_what_runs_finish(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("abcdef", gate=3)
    task = asyncio.create_task(answer(here))
    await here.until(lambda: any(job.position == 3 for job in here.scheduler.jobs.values()), "at the gate")
    here.scheduler.broadcast(Drain(5000))
    await here.until_here(lambda: here.frontend.client.draining, "the drain known")
    here.scheduler.open_gates()
    assert (await task)[0] == "abcdef"


@pytest.mark.parametrize("priority", [0, 3, 5])
async def test_without_credit_only_who_displaces_something_comes_in(here: Bench, priority: int) -> None:
    here.scheduler.broadcast(Load(Credit(0, 0, displaces=4, retry_after_ms=40_000), 0, 0, 0, 0, ()))
    await here.until_here(lambda: here.frontend.client.load is not None, "the load known")
    response = await here.post(CHAT, chat(priority=priority))
    assert (response.status_code, len(here.scheduler.submits)) == ((200, 1) if priority < 4 else (429, 0))
    assert priority < 4 or 40 <= int(response.headers["retry-after"]) <= 60


async def test_a_refusal_for_want_of_credit_renders_and_tokenises_nothing(
    here: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[object] = []
    prepare = here.frontend.preparer.prepare
    monkeypatch.setattr(
        here.frontend.preparer, "prepare", lambda *given, **more: prepared.append(prepare(*given, **more))
    )
    here.scheduler.broadcast(Load(Credit(0, 100), 0, 0, 0, 0, ()))
    await here.until_here(lambda: here.frontend.client.load is not None, "the load known")
    assert [(await here.post(CHAT, chat())).status_code for _ in range(5)] == [429] * 5
    assert not prepared and here.frontend.client.statistics().credit.refused == 5
