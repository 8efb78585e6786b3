"""The life of one request: read, check, wait for a model, tokenise, submit, answer in either transport.

Both transports read the same ``AnswerStream``; the non-streaming answer is its fold.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.answer import delivery
from frontend.answer.answers import Answer, Details
from frontend.answer.delivery import StreamDelivery, StreamOptions, Timing
from frontend.answer.scores import Speller
from frontend.errors import ApiError
from frontend.http.body_room import HeldBody
from frontend.http.envelope import request_id_of
from frontend.http.exchange import JSON_HEADERS, STREAM_HEADERS, ClientGone, Exchange
from frontend.http.guard import caller_of
from frontend.request import fields
from frontend.request.prepare import Prepared
from frontend.request.prompts import skips_special
from frontend.request.requests import CommonFields
from frontend.service import Frontend

REQUEST_ID = "x-request-id"


@dataclass(frozen=True)
class Route:
    """What differs between the routes."""

    request: type[CommonFields]
    answer: Callable[[str, int, str, str, Details], Answer]
    id_prefix: str


class Generation(Response):
    """The answer to one request; the work happens when it is sent, so that one scope owns it from start to end."""

    def __init__(self, frontend: Frontend, route: Route) -> None:
        super().__init__()
        self._frontend = frontend
        self._route = route
        self._began = time.monotonic()
        self._journey = frontend.journal.begin(route.id_prefix, self._began)
        self._timing = Timing(frontend.metrics, self._journey)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        frontend = self._frontend
        self._journey.request_id = request_id_of(scope)
        try:
            with frontend.bodies.hold() as held:
                await exchange.while_connected(
                    self._answer(exchange, held, await exchange.json_body(frontend.settings.max_body_bytes, held))
                )
            self._journey.end(self._journey.failure or "answered")
        except ClientGone:
            frontend.metrics.disconnects.inc()
            self._journey.end("client gone")
        except ApiError as error:
            self._journey.end(error.code or "error")
            raise
        finally:
            if not self._journey.outcome:
                self._journey.end("failed")

    async def _answer(self, exchange: Exchange, held: HeldBody, body: bytes) -> None:
        frontend, caller = self._frontend, caller_of(exchange.scope)
        request, ignored = await frontend.read(body, self._route.request, caller=caller)
        del body
        self._journey.read = time.monotonic()
        headers = {"x-ignored-fields": fields.ignored_header(ignored)} if ignored else {}
        if request.request_id is not None and exchange.header(REQUEST_ID.encode()) is None:
            headers[REQUEST_ID] = request.request_id
            self._journey.request_id = request.request_id
        try:
            deadline = None if request.timeout is None else self._began + request.timeout
            prepared = await frontend.prepare(request, caller=caller, deadline=deadline)
            self._journey.prepared = time.monotonic()
            request = request.without_prompt()  # an answer may take hours, and a prompt may be large
            held.release()
            await self._generate(exchange, request, prepared, {**headers, **prepared.notes})
        except ApiError as error:
            error.headers.update(headers)
            raise

    async def _generate(
        self, exchange: Exchange, request: CommonFields, prepared: Prepared, headers: dict[str, str]
    ) -> None:
        frontend = self._frontend
        journey = self._journey
        journey.id = f"{self._route.id_prefix}-{frontend.new_id()}"
        with frontend.open(prepared, request) as stream:
            journey.submitted, journey.feeds = time.monotonic(), stream.feeds
            answer = self._route.answer(
                journey.id,
                int(time.time()),
                frontend.name,
                prepared.fingerprint,
                self._details(request),
            )
            if request.stream:
                headers = {**STREAM_HEADERS, **headers}
                options = self._stream_options(request)
                await StreamDelivery(exchange, stream, answer, options, self._timing, headers).run()
            else:
                done = await delivery.fold(stream, answer, self._timing)
                await exchange.respond(200, {**JSON_HEADERS, **headers}, done)

    def _details(self, request: CommonFields) -> Details:
        as_ids = request.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = self._frontend.settings.return_tokens_as_token_ids
        return Details(
            Speller(self._frontend.token_bytes, skip_special=skips_special(request), as_ids=as_ids),
            alternatives=request.alternatives(),
            prompt_alternatives=-1 if request.prompt_logprobs is None else request.prompt_logprobs,
            token_ids=bool(request.return_token_ids),
            service_tier=request.service_tier is not None,
        )

    def _stream_options(self, request: CommonFields) -> StreamOptions:
        settings, given = self._frontend.settings, request.stream_options
        return StreamOptions(
            usage=settings.force_include_usage or request.wants_usage(),
            continuous_usage=given is not None and bool(given.continuous_usage_stats),
            separate_finish=settings.separate_finish_chunk,
            early_commit=settings.early_commit,
            ping_interval=settings.ping_interval,
        )
