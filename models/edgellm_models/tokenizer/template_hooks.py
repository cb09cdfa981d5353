"""Puts the calls that watch a rendering into a chat template's syntax tree, before it is compiled."""

from __future__ import annotations

from typing import Any

import jinja2.nodes as nodes


def _hook(name: str, arguments: list[Any], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=line)


def instrument(template: nodes.Template) -> nodes.Template:
    """Puts the hooks into a parsed template."""
    for node in list(template.find_all(nodes.For)):
        node.iter = _hook("limited_loop", [node.iter], node.lineno)
    for output in list(template.find_all(nodes.Output)):
        literal = sum(len(child.data) for child in output.nodes if isinstance(child, nodes.TemplateData))
        printed: list[nodes.Expr] = [
            child
            if isinstance(child, nodes.TemplateData)
            else _hook("limited_output", [child], output.lineno)
            for child in output.nodes
        ]
        if literal:
            printed.insert(0, _hook("limited_text", [nodes.Const(literal)], output.lineno))
        output.nodes = printed
    _replace_expressions(template)
    return template


def _replace_expressions(node: nodes.Node) -> None:
    """Wraps ``~`` and list, tuple and dict displays below a node, innermost first."""
    for name, value in list(node.iter_fields()):
        if isinstance(value, nodes.Node):
            _replace_expressions(value)
            setattr(node, name, _replaced(value))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _replace_expressions(item)
                    value[index] = _replaced(item)


def _replaced(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.Concat):
        return _hook("limited_concat", list(node.nodes), node.lineno)
    stored = isinstance(node, nodes.Tuple) and node.ctx != "load"
    if isinstance(node, nodes.List | nodes.Tuple | nodes.Dict) and not stored:
        if all(isinstance(child, nodes.Const) for child in node.iter_child_nodes()):
            return node
        return _hook("limited_container", [node], node.lineno)
    return node
