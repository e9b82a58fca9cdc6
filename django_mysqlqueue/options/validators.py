"""Parsers of settings: they return the value, or raise ``Invalid`` with the rule that it breaks."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from ipaddress import IPv4Address, IPv6Address, ip_address
from os import PathLike, fspath
from os.path import isabs
from typing import Any, NamedTuple, TypeVar

from django.conf import settings as django_settings
from django.db import InterfaceError, OperationalError

from django_mysqlqueue import filter_policies
from django_mysqlqueue.db.sizes import JOB_PATH_LENGTH
from django_mysqlqueue.exceptions import CommitOutcomeUnknown, StaleDelivery
from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.names.rules import NAME_LENGTH, RESERVED_PREFIX
from django_mysqlqueue.options.allowed_users import parse_allowed_users
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.delivery_limits import parse_key_rates, parse_rate

LONGEST_DELAY = 30 * 86400.0
"""Longest visibility timeout, backoff, nack or snooze delay, in seconds."""


T = TypeVar("T")


class Invalid(Exception):
    """A value is invalid. The text is the rule that it breaks."""


def number(*, minimum: float = 0.0, exclusive: bool = False, maximum: float = 1e9) -> Callable[[Any], float]:
    """Return a parser of a number of seconds.

    ``exclusive``: if True, ``minimum`` itself is not valid.
    """

    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            raise Invalid("must be a number of seconds")
        if value < minimum or (exclusive and value == minimum) or value > maximum:
            comparison = "above" if exclusive else "at least"
            raise Invalid(f"must be {comparison} {minimum:g} and at most {maximum:,.12g}")
        return float(value)

    return parse


def mapping(value: Any) -> Mapping[Any, Any]:
    """Require a dict. Those who need it check its content."""
    if not isinstance(value, Mapping):
        raise Invalid("must be a dict")
    return value


def topics(value: Any) -> tuple[str, ...]:
    """Parse a list of names of topics."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise Invalid("must be a list of topics")
    for one in value:
        if not isinstance(one, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,120}", one):
            raise Invalid(f"has {one!r}: a name must be 1 to 120 letters, digits, '.', '_' or '-'")
    return tuple(dict.fromkeys(value))


def integer(minimum: int, maximum: int = 2**31 - 1) -> Callable[[Any], int]:
    """Return a parser of an integer from ``minimum`` to ``maximum``."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise Invalid("must be an integer")
        if not minimum <= value <= maximum:
            raise Invalid(f"must be from {minimum} to {maximum}")
        return value

    return parse


def share(value: Any) -> int:
    """Parse the number of claims of which one is for lower priorities: 0 for none, or 2 or more."""
    parsed = integer(0, 1_000_000)(value)
    if parsed == 1:
        raise Invalid("must be 0, or 2 or more: with 1, no claim would be left for the highest priority")
    return parsed


def _by(parse: Callable[[Any], T]) -> Callable[[Any], T]:
    """Return a parser made of one that raises ``ValueError`` with the rule."""

    def parsed(value: Any) -> T:
        try:
            return parse(value)
        except ValueError as error:
            raise Invalid(str(error)) from None

    return parsed


rate = _by(parse_rate)
key_rates = _by(parse_key_rates)
filter_policy = _by(lambda value: value if isinstance(value, FilterPolicy) else filter_policies.parse(value))
allowed_users = _by(parse_allowed_users)


def task_paths(value: Any) -> tuple[str, ...]:
    """Parse a list of the dotted paths of tasks."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise Invalid("must be a list of dotted paths of tasks")
    for one in value:
        if not isinstance(one, str) or not 1 <= len(one) <= JOB_PATH_LENGTH or "," in one:
            raise Invalid(f"has {one!r}: must be the dotted path of a task, of at most {JOB_PATH_LENGTH} characters")
    return tuple(sorted(set(value)))


def field_name(value: Any) -> str:
    """Parse the name of a field of the metadata."""
    if not isinstance(value, str) or not 1 <= len(value) <= NAME_LENGTH:
        raise Invalid(f"must be the name of a field of the metadata, of 1 to {NAME_LENGTH} characters")
    if not value.isprintable():
        raise Invalid("must consist of printable characters")
    if value.startswith(RESERVED_PREFIX):
        raise Invalid(f"names that start with {RESERVED_PREFIX!r} are reserved")
    return value


_BACKOFF_FIELDS: dict[str, Callable[[Any], float]] = {
    "initial": number(maximum=LONGEST_DELAY),
    "factor": number(minimum=1.0, maximum=1000.0),
    "maximum": number(maximum=LONGEST_DELAY / 2),
    "jitter": number(maximum=1.0),
}


def backoff(value: Any) -> Backoff:
    """Parse a ``Backoff``, or a dict of some of its fields, in upper or lower case."""
    if isinstance(value, Backoff):
        value = {field.name: getattr(value, field.name) for field in fields(Backoff)}
    if not isinstance(value, Mapping):
        raise Invalid("must be a Backoff or a dict with 'initial', 'factor', 'maximum', 'jitter'")
    given: dict[str, float] = {}
    for key, item in value.items():
        name = str(key).lower()
        if name not in _BACKOFF_FIELDS:
            raise Invalid(f"has the unknown key {key!r}")
        try:
            given[name] = _BACKOFF_FIELDS[name](item)
        except Invalid as error:
            raise Invalid(f"{name} {item!r} {error}") from None
    return Backoff(**given)


def or_none(parse: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """Return a parser that accepts None, too."""
    return lambda value: None if value is None else parse(value)


def choice(*values: str) -> Callable[[Any], str]:
    """Return a parser of one of the given strings."""

    def parse(value: Any) -> str:
        if value not in values:
            raise Invalid(f"must be one of {', '.join(map(repr, values))}")
        return str(value)

    return parse


def boolean(value: Any) -> bool:
    """Require True or False."""
    if not isinstance(value, bool):
        raise Invalid("must be True or False")
    return value


def function(value: Any) -> Callable[..., str] | str:
    """Require a function or the dotted path of one, which is not imported."""
    if isinstance(value, str):
        if not all(part.isidentifier() for part in value.split(".")) or "." not in value:
            raise Invalid("must be a function or a dotted path to one")
    elif not callable(value):
        raise Invalid("must be a function or a dotted path to one")
    return value  # type: ignore[no-any-return]


def ratio(value: Any) -> float:
    """Parse a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise Invalid("must be a number from 0 to 1")
    return float(value)


def alias(value: Any) -> str:
    """Require an alias of ``DATABASES``."""
    if not isinstance(value, str) or value not in django_settings.DATABASES:
        raise Invalid(f"must be an alias of DATABASES ({', '.join(django_settings.DATABASES)})")
    return value


def archive_path(value: Any) -> str:
    """Return the path or URI of a folder as a string."""
    if not isinstance(value, (str, PathLike)) or not str(value):
        raise Invalid("must be the path or URI of a folder")
    return fspath(value)


def absolute_path(value: Any) -> str:
    """Return the absolute path of a folder as a string."""
    if not isinstance(value, (str, PathLike)) or not isabs(path := fspath(value)) or not isinstance(path, str):
        raise Invalid("must be an absolute path")
    return path


def name_of_group(value: Any) -> str:
    """Require the name of a group of users."""
    if not isinstance(value, str) or not value:
        raise Invalid("must be the name of a group of users")
    return value


class Address(NamedTuple):
    """A numeric IP address, and a port."""

    ip: IPv4Address | IPv6Address
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``10.0.0.5:7070`` or ``[::1]:7070``. Raises ValueError for anything else, such as the name of a host."""
        found = re.fullmatch(r"(?:([0-9.]+)|\[([0-9A-Fa-f:.]+)\]):([0-9]{1,5})", text)
        if found is None or not 0 < int(found[3]) < 65_536:
            raise ValueError(text)
        return cls(ip_address(found[1] or found[2]), int(found[3]))

    def __str__(self) -> str:
        return f"{self.ip}:{self.port}" if self.ip.version == 4 else f"[{self.ip}]:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        """The family of its sockets."""
        return socket.AF_INET if self.ip.version == 4 else socket.AF_INET6


def address(value: Any) -> Address:
    """Parse a numeric IP address and a port."""
    try:
        return Address.parse(str(value))
    except ValueError:
        raise Invalid("must be a numeric IP address and a port, such as '10.0.0.5:7070' or '[::1]:7070'") from None


def reachable_address(value: Any) -> Address:
    """Parse the address that others are to send to."""
    found = address(value)
    if found.ip.is_unspecified:
        raise Invalid("must be the address of one host, not of all its interfaces")
    return found


class Secret(str):
    """A text that neither logs nor tracebacks show."""

    def __repr__(self) -> str:
        return "'…'"


def secret(value: Any) -> Secret:
    """Require a key of its own, and hide it."""
    if not isinstance(value, str) or len(value) < 16:
        raise Invalid("must be a string of at least 16 characters")
    if value == django_settings.SECRET_KEY:
        raise Invalid("must not be SECRET_KEY: who knows it can forge sessions")
    return Secret(value)


def suffix(value: Any) -> str:
    """Require a text with which names of topics can end."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,20}", value):
        raise Invalid("must be 1 to 20 letters, digits, '.', '_' or '-'")
    return value


def token(value: Any) -> str | None:
    """Return a secret token, or None for an empty string, such as from an empty environment variable."""
    if value == "":
        return None
    if not isinstance(value, str) or not re.fullmatch(r"[!-~]{20,}", value):
        raise Invalid("must be at least 20 printable ASCII characters without spaces")
    return value


NEVER_REJECTED: tuple[type[Exception], ...] = (OperationalError, InterfaceError, CommitOutcomeUnknown, StaleDelivery)
"""Exceptions that say nothing about the message, such as a lost connection or a deadlock."""


def exceptions(value: Any) -> tuple[type[Exception], ...]:
    """Return exception classes as a tuple."""
    found = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not found:
        raise Invalid("must name at least one exception class")
    for one in found:
        if not isinstance(one, type) or not issubclass(one, Exception):
            raise Invalid("must be a subclass of Exception or a tuple of such classes")
        if issubclass(one, BaseExceptionGroup):
            raise Invalid("must not name an exception group: name the exceptions that it contains")
    return found


def rejected_exceptions(value: Any) -> tuple[type[Exception], ...]:
    """Return exception classes that may dead-letter a message, as a tuple."""
    found = exceptions(value)
    for one in found:
        if issubclass(one, NEVER_REJECTED):
            raise Invalid(f"must not name {one.__name__}: it is always retried, because the message does not cause it")
    return found
