"""What the value of a setting may be: parsers that return it or say which rule it breaks."""

from __future__ import annotations

import re
from collections.abc import Callable
from os import PathLike, fspath
from typing import Any, TypeVar

from django.conf import settings as django_settings
from django.db import InterfaceError, OperationalError

from django_mysqlqueue.exceptions import CommitOutcomeUnknown, StaleDelivery


class Invalid(Exception):
    """Carries the rule that a value breaks."""


def number(*, minimum: float = 0.0, exclusive: bool = False, maximum: float = 1e9) -> Callable[[Any], float]:
    """Returns a parser of a number of seconds within bounds."""

    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            raise Invalid("must be a number of seconds")
        if value < minimum or (exclusive and value == minimum) or value > maximum:
            comparison = "above" if exclusive else "at least"
            raise Invalid(f"must be {comparison} {minimum:g} and at most {maximum:g}")
        return float(value)

    return parse


def integer(minimum: int, maximum: int = 2**31 - 1) -> Callable[[Any], int]:
    """Returns a parser of a whole number within bounds."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise Invalid("must be a whole number")
        if not minimum <= value <= maximum:
            raise Invalid(f"must be from {minimum} to {maximum}")
        return value

    return parse


T = TypeVar("T")


def or_none(parse: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """Returns a parser that takes None as well."""
    return lambda value: None if value is None else parse(value)


def choice(*values: str) -> Callable[[Any], str]:
    """Returns a parser of one of some texts."""

    def parse(value: Any) -> str:
        if value not in values:
            raise Invalid(f"must be one of {', '.join(map(repr, values))}")
        return str(value)

    return parse


def boolean(value: Any) -> bool:
    """Returns True or False."""
    if not isinstance(value, bool):
        raise Invalid("must be True or False")
    return value


def function(value: Any) -> Callable[..., str] | str:
    """Returns a function, or the dotted path of one."""
    if isinstance(value, str):
        if not all(part.isidentifier() for part in value.split(".")) or "." not in value:
            raise Invalid("must be a function or a dotted path to one")
    elif not callable(value):
        raise Invalid("must be a function or a dotted path to one")
    return value  # type: ignore[no-any-return]


def ratio(value: Any) -> float:
    """Returns a share from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise Invalid("must be a number from 0 to 1")
    return float(value)


def alias(value: Any) -> str:
    """Returns an alias of ``DATABASES``."""
    if not isinstance(value, str) or value not in django_settings.DATABASES:
        raise Invalid(f"must be an alias of DATABASES ({', '.join(django_settings.DATABASES)})")
    return value


def archive_path(value: Any) -> str:
    """Returns a folder's path or URI."""
    if not isinstance(value, (str, PathLike)) or not str(value):
        raise Invalid("must be a path or a URI of a folder")
    return fspath(value)


def suffix(value: Any) -> str:
    """Returns what may end a topic."""
    allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
    if not isinstance(value, str) or not 1 <= len(value) <= 20 or not set(value) <= set(allowed):
        raise Invalid("must be 1 to 20 letters, digits, '.', '_' or '-'")
    return value


def token(value: Any) -> str | None:
    """Returns a secret; None for an empty text, as of an environment variable that is not set."""
    if value == "":
        return None
    if not isinstance(value, str) or not re.fullmatch(r"[!-~]{20,}", value):
        raise Invalid("must be at least 20 printable ASCII characters without a space")
    return value


NEVER_REJECTED: tuple[type[Exception], ...] = (OperationalError, InterfaceError, CommitOutcomeUnknown, StaleDelivery)
"""A lost connection, a deadlock, a lock wait timeout, a stale delivery: they say nothing about the message."""


def exceptions(value: Any) -> tuple[type[Exception], ...]:
    """Exception classes, or a single one."""
    found = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not found:
        raise Invalid("must name at least one exception class")
    for one in found:
        if not isinstance(one, type) or not issubclass(one, Exception):
            raise Invalid("must be a subclass of Exception or a tuple of them")
        if issubclass(one, BaseExceptionGroup):
            raise Invalid("must name the exceptions inside groups: a group counts as what is in it")
    return found


def rejected_exceptions(value: Any) -> tuple[type[Exception], ...]:
    """Exception classes that may dead-letter a message."""
    found = exceptions(value)
    for one in found:
        if issubclass(one, NEVER_REJECTED):
            raise Invalid(f"must not name {one.__name__}, which is always retried: it says nothing about the message")
    return found
