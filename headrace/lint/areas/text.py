"""Text that survives the way from tokens to the wire."""

from __future__ import annotations

from headrace.lint.answers import answer_of
from headrace.lint.exchange import accepted
from headrace.lint.facts import routes, tokenize
from headrace.lint.session import Session
from headrace.lint.verdicts import NotOffered, Wrong, check, check_each

SAMPLES = {
    "emoji": "🦦",
    "a joined emoji": "👩‍🚀👨‍👩‍👧‍👦",
    "a flag and skin tones": "🇳🇴👍🏽",
    "CJK": "客单价と日本語 한국어",
    "combining marks": "e\u0301a\u0308 ก็",
    "right to left": "שלום مرحبا",
    "spaces and breaks": "  a\n\n\tb  \r\nc ",
    "odd spaces": "a\u00a0b\u2028c\u200bd\u3000e",
    "control characters": "a\u0001b\u007fc",
    "a byte order mark": "a\ufeffb",
    "JSON and markup": '{"a": "\\n\\u0000"} <b>&amp;</b>',
    "data: lines": "data: [DONE]\n\ndata: {}\n\n",
}


@check_each("3", "{case} comes back to the byte through an echo, in both transports.", SAMPLES)
def echoed(session: Session, text: str) -> None:
    for stream in (False, True):
        answer = answer_of(session.complete(prompt=f"x{text}y", echo=True, max_tokens=1, stream=stream), "echo")
        if not answer.text.startswith(f"x{text}y"):
            raise Wrong(f"text is {answer.text[:80]!r}", answer.exchange)


@check_each("1", "{case} comes back to the byte through tokenize and detokenize.", SAMPLES)
def tokens_and_back(session: Session, text: str) -> None:
    exchange = tokenize(session, prompt=f"x{text}y", add_special_tokens=False)
    ids = accepted(exchange).json["tokens"]
    back = session.post("/v1/detokenize", {"model": session.target.model, "tokens": ids})
    if back.status == 404:
        back = session.post("/detokenize", {"model": session.target.model, "tokens": ids})
    if back.status == 404:
        raise NotOffered("no detokenize route")
    if accepted(back).json.get("prompt") != f"x{text}y":
        raise Wrong(f"comes back as {back.json.get('prompt')!r}", exchange, back)


@check_each(
    "3", "No delta ends amid a character on {case}: U+FFFD is in the stream only where it is in the whole.", routes()
)
def whole_characters(session: Session, route: str) -> None:
    session.facts.steady(session, route)
    text = "Say exactly: 🦦 👩‍🚀 客单价 é"
    fields = {"messages": [{"role": "user", "content": text}]} if route == "chat" else {"prompt": f"{text}\n🦦 👩‍🚀"}
    for limit in (1, 2, 3, 4, 5, 6, 8, 24):
        whole = answer_of(session.ask(route, max_tokens=limit, **fields))
        streamed = answer_of(session.ask(route, max_tokens=limit, stream=True, **fields))
        if whole.text != streamed.text:
            raise Wrong(f"{streamed.text!r} streamed, {whole.text!r} whole", whole.exchange, streamed.exchange)


@check("3", "An event's JSON never holds a raw line break or a half character.")
def one_line_events(session: Session) -> None:
    exchange = accepted(session.chat(stream=True, max_tokens=60))
    if exchange.events.faults:
        raise Wrong(exchange.events.faults[0], exchange)
