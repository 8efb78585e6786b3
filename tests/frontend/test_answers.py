"""One answer, two transports: the same text, ending and usage, however the engine cuts its steps."""

from __future__ import annotations

from tests.frontend.harness import CHAT, COMPLETIONS, Bench, chat, completion

TEXTS = ["ok", "Grüße, 世界! 👩‍👩‍👧 done", "", 'a\nb\u2028c"\\\x01']


async def test_first(here: Bench) -> None:
    r = await here.post(CHAT, chat())
    print(r.status_code, r.headers, r.text)
    print(await here.events(CHAT, chat(stream_options={"include_usage": True})))
    print(await here.events(COMPLETIONS, completion()))
    print((await here.client.get("/metrics")).text)
    assert 0
