from __future__ import annotations

import pytest

from frontend.text.budget import RenderLimits
from frontend.text.templates import ChatTemplate, TemplateError, TemplateLimitError
from headrace.model_files.artefacts import Artefacts

DOUBLING = "{{% set ns = namespace(x='aaaaaaaa') %}}{{% for i in range(60) %}}{{% set ns.x = {} %}}{{% endfor %}}"

TOO_MUCH = {
    "string times number": "{{ 'a' * 10000000000 }}",
    "list times number": "{{ ([0] * 10000000000) | length }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "product of powers": "{% set ns = namespace(x=10) %}"
    "{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "percent width": "{{ '%10000000000d' % 1 }}",
    "percent width from arguments": "{{ '%*d' % (10000000000, 1) }}",
    "format width": "{{ '{:10000000000}'.format(1) }}",
    "format width from arguments": "{{ '{:{}}'.format(1, 10000000000) }}",
    "format_map width": "{{ '{x:10000000000}'.format_map({'x': 1}) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "center method": "{{ 'a'.center(10000000000) }}",
    "center filter": "{{ 'a' | center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(10000000000) }}",
    "to_bytes": "{{ (1).to_bytes(10000000000, 'big') }}",
    "indent": "{{ ('a\n' * 1000000) | indent(100000) }}",
    "tojson indent": "{{ [[1]] | tojson(indent=10000000000) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace filter": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "join": "{{ (['a' * 1000000] * 100000) | join }}",
    "join method": "{{ ','.join(['a' * 1000000] * 100000) }}",
    "join with a long separator": "{{ ('a' * 1000000) | join('b' * 1000000) }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "sum of lists": "{{ ([[0] * 100000] * 10000) | sum(start=[]) | length }}",
    "batch": "{{ [1] | batch(10000000000, 0) | list }}",
    "doubling by +": DOUBLING.format("ns.x + ns.x"),
    "doubling by ~": DOUBLING.format("ns.x ~ ns.x"),
    "doubling by join": DOUBLING.format("[ns.x, ns.x] | join"),
    "doubling by %": DOUBLING.format("'%s%s' % (ns.x, ns.x)"),
    "doubling by format": DOUBLING.format("'{0}{0}'.format(ns.x)"),
    "doubling by list": DOUBLING.format("[ns.x, ns.x] | string"),
    "doubling by set block": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
    "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "collected slices": "{% set x = 'a' * 1000000 %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(100000) %}{% set ns.l = ns.l + [x[1:]] %}{% endfor %}",
    "long set block": "{% set x = 'a' * 1000000 %}"
    "{% set y %}{% for i in range(100000) %}{{ x }}{% endfor %}{% endset %}",
    "long output": "{% set x = 'a' * 100000 %}{% for i in range(100) %}{{ x }}{% endfor %}",
}

TOO_LONG = {
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "recursive loop": "{% macro f(n) %}{% for i in range(9) recursive %}{% if n %}{{ f(n - 1) }}{% endif %}"
    "{{ loop([]) }}{% endfor %}{% endmacro %}{{ f(99) }}",
    "filtered loop": "{% for i in range(90000) %}{% for j in range(90000) if j < 0 %}{% endfor %}{% endfor %}",
    "call blocks": "{% macro twice(n) %}{{ caller(n) }}{{ caller(n) }}{% endmacro %}"
    "{% macro f(n) %}{% if n %}{% call(m) twice(n) %}{{ f(m - 1) }}{% endcall %}{% endif %}{% endmacro %}{{ f(20) }}",
    "quadratic lists": "{% set ns = namespace(l=[]) %}"
    "{% for i in range(100000) %}{% set ns.l = ns.l + [i] %}{% endfor %}",
}

FORBIDDEN = {
    "class attributes": "{{ ''.__class__.__mro__ }}",
    "function globals": "{{ raise_exception.__globals__.keys() }}",
    "changing the input": "{{ messages.append(1) }}",
    "changing a message": "{{ messages[0].update({'role': 'x'}) }}",
    "files": "{% include '/etc/passwd' %}",
    "imports": "{% import 'os' as os %}",
    "private namespace names": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "environment": "{{ self._TemplateReference__context.environment }}",
    "endless text": "{{ lipsum(1) }}",
}

HIDDEN = {
    "attributes": "{{ ''.__class__ }}{{ raise_exception.__globals__ }}",
    "format attributes": "{{ '{0.__class__}'.format(messages) }}",
    "attr filter": "{{ messages | attr('__class__') }}",
    "map attribute": "{{ messages | map(attribute='__class__') | join }}",
}

USER = [{"role": "user", "content": "x"}]
QUICK = RenderLimits(seconds=0.05)
SMALL = RenderLimits(seconds=60, working_bytes=16 << 20)


@pytest.mark.parametrize("source", TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_render_that_makes_too_much_is_stopped(byte_model: Artefacts, source: str) -> None:
    with pytest.raises(TemplateLimitError):
        ChatTemplate(byte_model, source, limits=SMALL).render(USER)


@pytest.mark.parametrize("source", TOO_LONG.values(), ids=TOO_LONG)
def test_a_render_that_takes_too_long_is_stopped(byte_model: Artefacts, source: str) -> None:
    with pytest.raises(TemplateLimitError):
        ChatTemplate(byte_model, source, limits=QUICK).render(USER)


@pytest.mark.parametrize("source", FORBIDDEN.values(), ids=FORBIDDEN)
def test_the_sandbox_refuses(byte_model: Artefacts, source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(byte_model, source).render(USER)


@pytest.mark.parametrize("source", HIDDEN.values(), ids=HIDDEN)
def test_internal_attributes_are_not_there(byte_model: Artefacts, source: str) -> None:
    assert ChatTemplate(byte_model, source).render(USER).text == ""


def test_constant_expressions_are_limited_when_compiled(byte_model: Artefacts) -> None:
    template = ChatTemplate(byte_model, "{{ 'a' | center(10000000000) }}")
    template.check()
    with pytest.raises(TemplateLimitError):
        template.render(USER)


def test_deeply_nested_input_is_an_error_not_a_crash(byte_model: Artefacts) -> None:
    nested: list[object] = []
    for _ in range(20_000):
        nested = [nested]
    with pytest.raises(TemplateError):
        ChatTemplate(byte_model, "{{ x | tojson }}").render(USER, template_kwargs={"x": nested})


@pytest.mark.parametrize("where", ["message", "documents"])
def test_deeply_nested_untrusted_input_is_an_error_too(byte_model: Artefacts, where: str) -> None:
    nested: list[object] = []
    for _ in range(20_000):
        nested = [nested]
    message = {"role": "user", "content": "x", **({"extra": nested} if where == "message" else {})}
    documents = [{"text": nested}] if where == "documents" else None
    with pytest.raises(TemplateError, match="nested too deeply"):
        ChatTemplate(byte_model).render([message], documents=documents)


def test_nested_tools_cannot_multiply_by_their_indentation(byte_model: Artefacts) -> None:
    nested: object = ["a"] * 20_000
    for _ in range(300):
        nested = [nested]
    tools = [{"type": "function", "function": {"name": "f", "parameters": nested}}]
    with pytest.raises(TemplateLimitError):
        ChatTemplate(byte_model, "{{ tools | tojson(indent=4) }}", limits=SMALL).render(USER, tools=tools)


def test_long_conversations_render_within_the_limits(byte_model: Artefacts) -> None:
    turns = [{"role": role, "content": "word " * 100} for _ in range(1000) for role in ("user", "assistant")]
    text = ChatTemplate(byte_model).render(turns).text
    assert text.count("<|im_start|>") == 2001
