"""Where workers are found. One source a file.

A source is a class called ``SOURCE`` in a module of this package, or an entry point ``warmroute.discovery``; its options are
its constructor's keyword arguments. What it has to do is told in `gateway.discovery.base`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from inspect import Parameter, signature
from pkgutil import iter_modules
from typing import Any

from gateway.discovery.base import BadOption, Source, Template


def names() -> list[str]:
    """Sources of this package and of installed extensions."""
    own = [module.name for module in iter_modules(__path__) if module.name != "base"]
    return sorted({*own, *(point.name for point in entry_points(group="warmroute.discovery"))})


def load(kind: str, options: Mapping[str, Any], template: Template) -> Source:
    """Make the source ``kind`` with ``options``, whose workers are made after ``template``; it opens nothing yet.

    Raises `BadOption` where its constructor does not take them; `BadOption.option` is empty if there is no such source.
    """
    made = _kind(kind)
    parameters = signature(made).parameters
    for option in options:
        if option not in parameters:
            near = difflib.get_close_matches(option, parameters, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"its options: {', '.join(parameters)}"
            raise BadOption(f"the source {kind} has no option {option!r}; {hint}", option)
    for parameter in parameters.values():
        if parameter.default is Parameter.empty and parameter.name not in options:
            raise BadOption(f"the source {kind} needs the option {parameter.name!r}", parameter.name)
    source: Source = made(**options)
    source.template = template
    return source


def _kind(kind: str) -> Any:
    if kind not in names():
        near = difflib.get_close_matches(kind, names(), 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names())}"
        raise BadOption(f"no source is called {kind!r}; {hint}", "")
    points = [point for point in entry_points(group="warmroute.discovery") if point.name == kind]
    return points[0].load() if points else import_module(f"{__name__}.{kind}").SOURCE
