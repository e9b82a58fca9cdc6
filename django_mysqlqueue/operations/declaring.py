"""What all operations have in common: who runs one, why, where, and whether it only previews the change."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Required, TypedDict, TypeVar, get_type_hints

from django_mysqlqueue.operations.arguments import alias_for
from django_mysqlqueue.service.audit import By

P = ParamSpec("P")
R = TypeVar("R")


class How(TypedDict, total=False):
    """The keyword arguments that all operations take after their own."""

    actor: Required[str]
    """who runs the operation, for the audit log."""
    reason: str
    """why, for the audit log."""
    using: str | None
    """alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice)."""
    dry_run: bool
    """change nothing; return what would be changed."""


DEFAULTS: dict[str, Any] = {"reason": "", "using": None, "dry_run": False}


class Work(NamedTuple):
    """Where an operation works, for whom, and whether it is only previewed."""

    using: str
    by: By
    dry_run: bool


def operates(function: Callable[P, R]) -> Callable[P, R]:
    """Give an operation, which takes ``**how: Unpack[How]``, the signature that has these arguments one by one."""
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
    return call


@contextmanager
def operating(how: How, **names: str) -> Iterator[Work]:
    """Yield where an operation works, as ``alias_for`` does, who runs it, and whether it is only previewed.

    Raises:
        OperationRefused: as for ``alias_for``.
    """
    by: By = {"actor": how["actor"], "reason": how.get("reason", "")}
    with alias_for(how.get("using"), **by, **names) as alias:
        yield Work(alias, by, bool(how.get("dry_run")))
