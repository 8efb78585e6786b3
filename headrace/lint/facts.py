"""What checks need to know of the server under judgement, asked for once each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.lint.answers import Answer, answer_of, differences
from headrace.lint.exchange import Exchange
from headrace.lint.session import ROUTES, Session
from headrace.lint.verdicts import NotOffered, Wrong

T = TypeVar("T")

REFERENCE_TOKENS = 40
VARIED_SEEDS = (1, 2, 3)


@dataclass
class _Known:
    value: Any = None
    missing: str = ""


class Facts:
    """Each fact is found by the first check that asks; where it cannot be, who asks cannot judge."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._lock = threading.RLock()

    def context(self, session: Session) -> int:
        """Most tokens of prompt and output. Raises NotOffered."""
        return self._once("context", lambda: _context(session))

    def reference(self, session: Session, route: str) -> Answer:
        """A greedy answer of up to 40 tokens to the common question. Raises NotOffered."""
        return self._once(f"reference {route}", lambda: _reference(session, route))

    def steady(self, session: Session, route: str) -> None:
        """Raises NotOffered when asking the same twice, greedily, gives two answers."""
        self._once(f"steady {route}", lambda: _steady(session, route, self.reference(session, route)))

    def samples(self, session: Session, route: str) -> None:
        """Raises NotOffered when answers never vary, however they are sampled: then nothing can be seen of it."""
        self._once(f"samples {route}", lambda: _samples(session, route))

    def tokens(self, session: Session, text: str) -> list[int]:
        """Ids of a text as a raw prompt without added tokens. Raises NotOffered."""
        return self._once(f"tokens {text}", lambda: _tokens(session, text))

    def _once(self, name: str, find: Callable[[], T]) -> T:
        with self._lock:
            if name not in self._known:
                try:
                    self._known[name] = _Known(find())
                except (Wrong, NotOffered) as reason:
                    self._known[name] = _Known(missing=str(reason))
            known = self._known[name]
        if known.missing:
            raise NotOffered(f"cannot be judged: {known.missing}")
        value: T = known.value
        return value


def tokenize(session: Session, **fields: Any) -> Exchange:
    """Ask for the tokens of a prompt or of messages. Raises NotOffered when there is no such route."""
    exchange = session.post("/v1/tokenize", {"model": session.target.model, **fields})
    if exchange.status in (404, 405):
        exchange = session.post("/tokenize", {"model": session.target.model, **fields})
    if exchange.status in (404, 405, 501):
        raise NotOffered("no tokenize route")
    return exchange


def _context(session: Session) -> int:
    for entry in session.get("/v1/models").json.get("data") or []:
        if isinstance(entry, dict) and entry.get("id") == session.target.model:
            length = entry.get("max_model_len")
            if isinstance(length, int) and length > 0:
                return length
    raise NotOffered("the model's context length is not to be found in /v1/models")


def _reference(session: Session, route: str) -> Answer:
    answer = answer_of(session.ask(route, max_tokens=REFERENCE_TOKENS))
    if len(answer.text) < 8:
        raise NotOffered(f"the model's answer is too short: {answer.text!r}")
    return answer


def _steady(session: Session, route: str, first: Answer) -> bool:
    for _ in range(2):
        if differences(first, answer_of(session.ask(route, max_tokens=REFERENCE_TOKENS))):
            raise NotOffered("asking the same twice at temperature 0 gives two answers")
    return True


def _samples(session: Session, route: str) -> bool:
    texts = {
        answer_of(session.ask(route, max_tokens=16, temperature=2.0, top_p=1.0, seed=seed)).text
        for seed in VARIED_SEEDS
    }
    texts.add(answer_of(session.ask(route, max_tokens=16)).text)
    if len(texts) == 1:
        raise NotOffered("answers are the same at any temperature and seed")
    return True


def _tokens(session: Session, text: str) -> list[int]:
    exchange = tokenize(session, prompt=text, add_special_tokens=False)
    tokens = exchange.json.get("tokens") if exchange.status == 200 else None
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, int) for token in tokens):
        raise NotOffered("the server does not tell the ids of a text")
    return tokens


def routes() -> dict[str, str]:
    """The two routes of text as cases of a check."""
    return {name: name for name in ROUTES}
