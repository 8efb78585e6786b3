"""Finds out whether a chat template iterates over content parts or wants one string."""

from __future__ import annotations

import jinja2
from jinja2 import nodes

from frontend.text.conversation import ContentFormat


def detect_content_format(environment: jinja2.Environment, source: str) -> ContentFormat:
    """ "openai" when a loop of the template runs over a `content`, or over a variable set from one."""
    try:
        tree = environment.parse(source)
    except jinja2.TemplateSyntaxError:
        return "string"  # compiling it reports the error
    names = {
        assignment.target.name
        for assignment in tree.find_all(nodes.Assign)
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, frozenset())
    }
    loops = tree.find_all(nodes.For)
    return "openai" if any(_is_content(loop.iter, frozenset(names)) for loop in loops) else "string"


def _is_content(node: nodes.Node, names: frozenset[str]) -> bool:
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
