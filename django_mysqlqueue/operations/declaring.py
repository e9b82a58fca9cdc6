"""What all operations have in common: who runs one, why, where, and whether it only previews the change."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import (
    Annotated,
    Any,
    NamedTuple,
    ParamSpec,
    Required,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from django.db import connections

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.names.rules import KEY_LENGTH
from django_mysqlqueue.operations.arguments import REASON_LENGTH, text
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.sql.connection import apart

P = ParamSpec("P")
R = TypeVar("R")


class How(TypedDict, total=False):
    """The keyword arguments that all operations take after their own."""

    actor: Required[Annotated[str, "who runs the operation, for the audit log."]]
    reason: Annotated[str, "why, for the audit log."]
    using: Annotated[
        str | None, "alias of the queue's database (default: ``MYSQLQUEUE[\"DATABASE\"]``, else the router's choice)."
    ]
    dry_run: Annotated[bool, "change nothing; return what would be changed."]


DEFAULTS: dict[str, Any] = {"reason": "", "using": None, "dry_run": False}


class Work(NamedTuple):
    """Where an operation works, for whom, and whether it is only previewed."""

    using: str
    by: By
    dry_run: bool


def operates(function: Callable[P, R]) -> Callable[P, R]:
    """Give an operation, which takes ``**how: Unpack[How]``, the signature and docstring that have these arguments."""
    signature = inspect.signature(function)
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    shared = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name, inspect.Parameter.empty), annotation=kind
        )
        for name, kind in get_type_hints(How).items()
    ]
    signature = signature.replace(parameters=[*own, *shared])

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}") from None
        return function(*args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__doc__ = _with_texts(function.__doc__ or "")
    return call


def _with_texts(docstring: str) -> str:
    """Return a docstring with the arguments of ``How`` that its section ``Args`` does not describe itself."""
    before, heading, arguments = inspect.cleandoc(docstring).partition("\nArgs:\n")
    arguments, blank, after = arguments.partition("\n\n")
    for name, hint in get_type_hints(How, include_extras=True).items():
        described = get_args(hint)[0] if get_origin(hint) is Required else hint
        if heading and f"    {name}: " not in arguments:
            arguments += f"\n    {name}: {described.__metadata__[0]}"
    return f"{before}{heading}{arguments}{blank}{after}"


@contextmanager
def operating(how: How, **names: str) -> Iterator[Work]:
    """Yield where an operation works, for whom, and whether it is only previewed.

    If the caller has a transaction open on the queue's database, it works on another connection.

    ``names``: further arguments that must be strings: ``group``, ``topic``, ``subscriber``.
    """
    by: By = {"actor": how["actor"], "reason": how.get("reason", "")}
    if not text("actor", by["actor"], most=KEY_LENGTH).strip():
        raise OperationRefused(f"actor {by['actor']!r}: must not be empty, for the audit log")
    text("reason", by["reason"], most=REASON_LENGTH)
    for name, value in names.items():
        text(name, value, most=KEY_LENGTH)
    using = how.get("using")
    if using is not None and using not in connections:
        raise OperationRefused(f"using {using!r}: DATABASES has no such alias")
    alias = queue_alias(using, topic=names.get("topic"))
    with apart(alias):
        yield Work(alias, by, bool(how.get("dry_run")))
