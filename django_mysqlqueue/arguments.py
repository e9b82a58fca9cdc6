"""The arguments of public functions: their checks, by the types in the signatures, and those that several share."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable
from functools import cache, wraps
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    Required,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from django.core.exceptions import SynchronousOnlyOperation

P = ParamSpec("P")
R = TypeVar("R")
LEAST = {"limit": 1, "runs": 0}
"""The least values of integers with these names."""
HIGHEST = 2**63 - 1
SHOWN = 60
"""Maximum number of characters of a value that an error shows."""


class _Rule(NamedTuple):
    text: str
    """What a value must be."""
    allows: Callable[[Any], bool]


def checked(
    error: type[Exception] = ValueError, *, only: Iterable[str] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: a call whose arguments do not have the types of the signature raises an error.

    The error names the argument, its value and the rule.

    ``only``: names of the arguments to check (default: all).
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        names = tuple(only) or tuple(signature.parameters)

        @cache
        def rules() -> dict[str, _Rule]:
            hints = get_type_hints(function)
            return {name: _rule(hints[name], name) for name in names}

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            found = rules()
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return function(*args, **kwargs)  # Its error names the function.
            for name, value in given.items():
                several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
                for one in value if several else (value,):
                    if name in found and not found[name].allows(one):
                        raise error(f"{name} {shown(one)}: must be {found[name].text}")
            return function(*args, **kwargs)

        return call

    return decorate


def sync_only(instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: Django's error for a call from async code names the function to await instead."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except SynchronousOnlyOperation:
                raise SynchronousOnlyOperation(
                    f"{function.__name__}() cannot be called from async code: use “await {instead}(…)”."
                ) from None

        return call

    return decorate


def arguments_of(function: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Return a decorator: a function that only hands its arguments on has the signature of the one that takes them."""

    def decorate(hands_on: Callable[..., R]) -> Callable[P, R]:
        returns = inspect.signature(hands_on).return_annotation
        signature = inspect.signature(function).replace(return_annotation=returns)
        hands_on.__signature__ = signature  # type: ignore[attr-defined]
        return hands_on

    return decorate


def spelled_out(function: Callable[P, R]) -> Callable[P, R]:
    """Give a function that takes ``**…: Unpack[…]`` the signature and the docstring that have these arguments.

    The type of each is ``Annotated`` with its text and, unless it is None or the argument is required, its default.
    """
    signature = inspect.signature(function)
    *parameters, several = signature.parameters.values()
    (shared,) = get_args(get_type_hints(function)[several.name])
    before, heading, arguments = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:")
    arguments, blank, after = arguments.partition("\n\n")
    for name, hint in get_type_hints(shared, include_extras=True).items():
        is_required = get_origin(hint) is Required
        kind, text, *given = get_args(get_args(hint)[0] if is_required else hint)
        default = inspect.Parameter.empty if is_required else given[0] if given else None
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
        if heading and f"\n    {name}: " not in arguments:
            arguments += f"\n    {name}: {text}"
    signature = signature.replace(parameters=parameters)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}") from None
        return function(*args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__doc__ = f"{before}{heading}{arguments}{blank}{after}"
    return call


def shown(value: object) -> str:
    """Return a value as an error shows it; one that is nested too deeply by its type."""
    try:
        return cut(repr(value))
    except RecursionError:
        return f"<{type(value).__name__}>"


def cut(text: str) -> str:
    """Return a text, without what is beyond ``SHOWN`` characters."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode a text: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _rule(hint: Any, name: str) -> _Rule:
    """Return the rule of an argument."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        rules = [_rule(one, name) for one in parts]
        return _Rule(" or ".join(one.text for one in rules), lambda value: any(one.allows(value) for one in rules))
    if origin is Literal:
        return _Rule(f"one of {', '.join(map(repr, parts))}", lambda value: value in parts)
    if origin is tuple:
        rules = [_rule(one, name) for one in parts]
        return _Rule(
            f"a tuple of {len(rules)}",
            lambda value: (
                isinstance(value, tuple)
                and len(value) == len(rules)
                and all(rule.allows(one) for rule, one in zip(rules, value, strict=True))
            ),
        )
    if origin is Callable:
        return _Rule("a function", callable)
    if origin is not None and parts and issubclass(origin, Iterable):
        item = _rule(parts[0], name)
        is_kept = issubclass(origin, Collection)  # The items of an iterator can be read only once.
        return _Rule(
            f"a {origin.__name__.lower()}, and each item {item.text}",
            lambda value: (
                isinstance(value, origin)
                and not isinstance(value, (str, bytes))
                and (not is_kept or all(map(item.allows, value)))
            ),
        )
    return _rule_of_class(origin or hint, name)


def _rule_of_class(kind: Any, name: str) -> _Rule:
    if kind is int:
        lowest = LEAST.get(name, -HIGHEST)
        text = f"an integer of at least {lowest}" if name in LEAST else "an integer of at most 63 bits"
        return _Rule(text, lambda value: type(value) is int and lowest <= value <= HIGHEST)
    if kind is float:
        return _Rule(
            "a number of at least 0", lambda value: type(value) in (int, float) and math.isfinite(value) and value >= 0
        )
    if kind is str:
        return _Rule("a str (valid Unicode)", lambda value: isinstance(value, str) and is_unicode(value))
    if kind is NoneType:
        return _Rule("None", lambda value: value is None)
    if kind is Any or not isinstance(kind, type):  # A variable of types has no class.
        return _Rule("any value", lambda _: True)
    return _Rule(f"a {kind.__name__}", lambda value: isinstance(value, kind))
