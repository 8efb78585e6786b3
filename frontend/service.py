"""The parts of one frontend, put together: what a route handler needs, and nothing about HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator

from frontend import errors
from frontend.answer.answer_stream import AnswerStream
from frontend.http.body_room import BodyRoom
from frontend.http.keys import ANYONE, Caller
from frontend.journal import Journal
from frontend.metrics import Metrics
from frontend.request import checks, fields, generation
from frontend.request.prepare import Prepared, Preparer
from frontend.request.requests import CommonFields
from frontend.session.scheduler_client import ClientOptions, SchedulerClient
from frontend.settings import FrontendSettings
from frontend.text.detokenizer import TokenBytes
from frontend.text.templates import ChatTemplate, read_override
from headrace.model_files.artefacts import Artefacts
from protocol.link import LinkTimes

log = logging.getLogger("headrace.frontend")

INLINE_BODY = 64 * 1024
"""Bodies up to this size are decoded and checked in the event loop; larger ones in a thread."""
TURN_SECONDS = 0.25
MAX_LOGGED_FIELDS = 1024


class Frontend:
    """One frontend process."""

    def __init__(
        self,
        settings: FrontendSettings,
        artefacts: Artefacts,
        *,
        on_ready: Callable[[], None] = lambda: None,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Raises TemplateError or ArtefactError for a template or tokenizer that cannot be used."""
        self.settings = settings
        self.artefacts = artefacts
        self.names = settings.served_model_names or (artefacts.name,)
        self.name = self.names[0]
        """The served name that answers carry, and the model's name on the scheduler's wire."""
        self.created = int(artefacts.directory.stat().st_mtime)
        """When the model's files were made; the same in every frontend beside this one."""
        self.draining = False
        self.under_way = 0
        """HTTP requests being answered."""
        self.idle = asyncio.Event()
        """Set while none is."""
        self.idle.set()
        self.turns = 0
        """Turns of the event loop, for those who watch that it turns."""
        self.token_bytes = TokenBytes.from_tokenizer(artefacts.tokenizer())
        self.preparer = Preparer(
            settings,
            artefacts,
            _template(settings, artefacts),
            self.token_bytes,
            defaults=_defaults(settings, artefacts),
        )
        self.client = SchedulerClient(
            ClientOptions(
                address=settings.scheduler,
                model=self.name,
                tokenizer_digest=artefacts.tokenizer_digest(),
                security=settings.scheduler_security,
                grace=settings.scheduler_grace,
                times=LinkTimes(peer_timeout=settings.peer_timeout),
            ),
            progress=lambda: self.turns,
            on_first_session=on_ready,
            on_refused=on_refused,
        )
        self.metrics = Metrics(lambda: self.client.load, self.client.statistics, lambda: self.under_way)
        self.journal = Journal()
        self.bodies = BodyRoom(settings.max_bodies_bytes)
        self.preparing = 0
        """Requests between their arrival and their Submit."""
        self._logged_fields: set[tuple[str, str]] = set()
        """Who sent which field that was ignored, as far as it was logged."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hold a session with the scheduler while inside."""
        self.client.start()
        turning = asyncio.create_task(self._turn())
        try:
            yield
        finally:
            turning.cancel()
            await self.client.close()
            self.preparer.close()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request while it is being answered."""
        self.under_way += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.under_way -= 1
            if not self.under_way:
                self.idle.set()

    def not_ready_because(self) -> str:
        """Why no new request should come here; empty when one may."""
        return "draining" if self.draining else self.client.not_ready_because()

    def check_model(self, model: str) -> None:
        """Raise ApiError for a name that is not served here."""
        if model not in self.names:
            raise errors.model_not_found(model[:256])

    async def read(
        self, body: bytes, kind: type[CommonFields], *, caller: Caller = ANYONE
    ) -> tuple[CommonFields, list[str]]:
        """The request in a body, checked, and its ignored fields. Raises ApiError."""

        def work() -> tuple[CommonFields, list[str]]:
            request, ignored = fields.read(body, kind, strict=self.settings.strict_fields)
            self.check_model(request.model)
            self.preparer.check(request)
            return request, ignored

        request, ignored = work() if len(body) <= INLINE_BODY else await self.preparer.in_pool(work)
        for name in ignored:
            seen = (caller.tenant, name[: fields.MAX_IGNORED_NAME])
            if seen not in self._logged_fields and len(self._logged_fields) < MAX_LOGGED_FIELDS:
                self._logged_fields.add(seen)
                log.info("request field of %s ignored: %s", caller.tenant or "anyone", fields.ignored_header([name]))
        return request, ignored

    async def prepare(
        self, request: CommonFields, *, caller: Caller = ANYONE, deadline: float | None = None
    ) -> Prepared:
        """Everything up to the Submit; held while scheduler or model are not there.

        ``deadline`` as ``time.monotonic`` has it. Raises ApiError.
        """
        if self.draining:
            raise errors.unavailable("This server is shutting down.")
        if self.preparing >= self.settings.max_preparing:
            raise errors.overloaded("Too many requests are waiting here; try again later.")
        self.preparing += 1
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                model = await self.client.available()
                with self.client.credit.reserved(checks.choices_of(request), caller.priority_of(request.priority)):
                    return await self.preparer.in_pool(
                        lambda: self.preparer.prepare(request, model, caller=caller, deadline=deadline)
                    )
        except TimeoutError as error:
            raise errors.timed_out("The deadline passed before the request could be submitted.") from error
        finally:
            self.preparing -= 1

    def open(self, prepared: Prepared, request: CommonFields) -> AnswerStream:
        """Submit, and read what comes of it."""
        return AnswerStream(self.client, prepared, request, self.token_bytes)

    def new_id(self) -> str:
        """A fresh id for an answer or a request."""
        return secrets.token_hex(12)

    async def _turn(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(TURN_SECONDS)


def _template(settings: FrontendSettings, artefacts: Artefacts) -> ChatTemplate:
    override = read_override(settings.chat_template) if settings.chat_template else None
    template = ChatTemplate(
        artefacts,
        override,
        content_format=None
        if settings.chat_template_content_format == "auto"
        else settings.chat_template_content_format,
        trust_contents=settings.allow_special_tokens_in_content,
    )
    template.check()
    return template


def _defaults(settings: FrontendSettings, artefacts: Artefacts) -> generation.Defaults:
    if settings.generation_config == "none":
        return generation.Defaults()
    return generation.Defaults.of_model(artefacts.generation_config)
