"""A jinja2 environment for chat templates: what transformers gives them, inside limits.

A render cannot be interrupted from outside (it runs in a thread), so it accounts for itself. Before a template is
compiled its syntax tree is changed so that every loop step, every call and every operation that makes a string or a
list charges the render's `Budget`. Between two charges lies at most one built-in operation on values the budget has
already bounded, so a runaway stops within milliseconds of its deadline.

Templates see plain JSON values only; the sandbox refuses underscore attributes and everything that changes a value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from frontend.text import sizing
from frontend.text.budget import Budget, RenderLimitExceeded, RenderLimits
from frontend.text.guarded_filters import guard_filters

_STEP = "_each_step"
_CHARGE = "_charged"
_MAX_DATE_FORMAT = 200


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates. Safe to share between threads."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, clock: Callable[[], datetime], limits: RenderLimits) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self._limits = limits
        self._budget: ContextVar[Budget] = ContextVar("render_budget")
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: clock().strftime(str(pattern)[:_MAX_DATE_FORMAT])
        del self.globals["lipsum"]  # makes text of any length
        self.filters["tojson"] = self._tojson
        guard_filters(self.filters, self._charge)
        self.filters[_STEP] = self._steps
        self.filters[_CHARGE] = self._charged

    def compile_template(self, source: str) -> jinja2.Template:
        """Parse and compile. Raises jinja2.TemplateSyntaxError."""
        token = self._budget.set(Budget(self._limits))  # constant expressions are evaluated here
        try:
            return self.from_string(source)
        finally:
            self._budget.reset(token)

    def render_template(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render within the limits. Raises RenderLimitExceeded, or what the template's own evaluation raises."""
        budget = Budget(self._limits)
        token = self._budget.set(budget)
        try:
            pieces = []
            for piece in template.root_render_func(template.new_context(variables)):
                budget.output(piece)
                pieces.append(piece)
            return "".join(pieces)
        finally:
            self._budget.reset(token)

    def concat(self, pieces: Iterable[str]) -> str:
        """What macros, `set` blocks and filter blocks put their output together with."""
        made = list(pieces)
        self._charge(sum(map(len, made)))
        return "".join(made)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call a template makes, macros and recursive loops included."""
        budget = __self._budget.get()
        budget.tick()
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str | bytes | int):
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            budget.charge(sizing.method_call(__obj.__name__, __obj.__self__, args, kwargs))
        elif isinstance(__obj, LoopContext):
            args = tuple(_Steps(arg, budget) for arg in args)
        result = super().call(__context, __obj, *args, **kwargs)
        budget.charge(sizing.size_of(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Operators whose result can be larger than both sides."""
        estimate = {"+": sizing.total, "*": sizing.product, "**": sizing.power, "%": sizing.percent}[operator]
        self._charge(estimate(left, right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        pattern: str = value.__self__

        def charged(*args: Any, **kwargs: Any) -> str:
            values = args[0].values() if value.__name__ == "format_map" and args else [*args, *kwargs.values()]
            self._charge(sizing.format_call(pattern, values))
            return wrapped(*args, **kwargs)

        return charged

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        _Metering(self).visit(source)
        return super()._generate(source, *args, **kwargs)

    def _charge(self, size: int) -> None:
        self._budget.get().charge(size)

    def _charged(self, value: Any) -> Any:
        self._charge(sizing.size_of(value))
        return value

    def _steps(self, values: Any) -> _Steps:
        return _Steps(values, self._budget.get())

    def _tojson(
        self,
        x: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers has it: plain `json.dumps`, no HTML escapes. With `indent`, depth multiplies the size."""
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, check_circular=False
        )
        if indent is None:
            return encoder.encode(x)
        pieces = []
        for piece in encoder.iterencode(x):
            self._charge(len(piece))
            pieces.append(piece)
        return "".join(pieces)


class _Metering(NodeTransformer):
    """Puts the charging filters around what a template iterates over, joins with `~` and cuts out with a slice."""

    def __init__(self, environment: ChatEnvironment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._through(_STEP, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [self._through(_CHARGE, part) for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._through(_CHARGE, node) if isinstance(node.arg, nodes.Slice) else node

    def _through(self, name: str, node: nodes.Node) -> nodes.Expr:
        made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        made.set_environment(self._environment)
        return made


class _Steps:
    """An iterable that charges one tick an item and keeps the length that `loop.length` asks for."""

    def __init__(self, values: Any, budget: Budget) -> None:
        self._values = values
        self._budget = budget

    def __iter__(self) -> Iterator[Any]:
        tick = self._budget.tick
        for value in self._values:
            tick()
            yield value

    def __len__(self) -> int:
        return len(self._values)


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks what an assistant wrote, for training; here it is a scope."""

    tags = {"generation"}  # noqa: RUF012 — the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Dict:
    """The global `dict`, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """The global `namespace`, which takes no names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that a template may pass `self=`
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute may not begin with an underscore: {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


__all__ = ["ChatEnvironment", "RenderLimitExceeded", "RenderLimits"]
