"""What an exception that a handler raises means for its message: another attempt, or the DLQ at once."""

from __future__ import annotations

from collections.abc import Iterator

from django_mysqlqueue.runtime.handling.handler import Handler
from django_mysqlqueue.validators import NEVER_REJECTED


def is_rejected(handler: Handler, error: BaseException) -> bool:
    """Whether a message whose handler raised ``error`` is dead-lettered without another attempt.

    ``reject_on`` is checked before ``retry_on``. A group of exceptions is rejected
    only if each exception in it would be. Never rejected are ``NEVER_REJECTED``,
    what was raised from one of them, and what is no ``Exception`` (SystemExit,
    KeyboardInterrupt, CancelledError).
    """
    if not handler.reject_on and handler.retry_on is None:
        return False
    if any(isinstance(one, NEVER_REJECTED) for one in _with_causes(error)):
        return False
    return all(_is_named(handler, one) for one in _leaves(error))


def _is_named(handler: Handler, error: BaseException) -> bool:
    if not isinstance(error, Exception):
        return False
    if isinstance(error, handler.reject_on):
        return True
    return handler.retry_on is not None and not isinstance(error, handler.retry_on)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of a group, of groups in it too; another exception stands for itself."""
    found = [error]
    while found:
        one = found.pop()
        if isinstance(one, BaseExceptionGroup):
            found += one.exceptions
        else:
            yield one


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, those in it if it is a group, and what they were raised from (``raise … from``), all the way."""
    seen: set[int] = set()
    found: list[BaseException] = [error]
    while found:
        one = found.pop()
        if id(one) in seen:
            continue  # one may be its own cause
        seen.add(id(one))
        yield one
        if one.__cause__ is not None:
            found.append(one.__cause__)
        if isinstance(one, BaseExceptionGroup):
            found += one.exceptions
