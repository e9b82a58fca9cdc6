"""Whether an exception that a handler raises leads to another attempt, or to the DLQ at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from django_mysqlqueue.options.validators import NEVER_REJECTED
from django_mysqlqueue.subscriptions.retry_later import RetryLater


class Rejecting(Protocol):
    """Options that say which exceptions are retried."""

    @property
    def reject_on(self) -> tuple[type[Exception], ...]:
        """Those that are not."""

    @property
    def retry_on(self) -> tuple[type[Exception], ...] | None:
        """The only ones that are, or None."""


def is_rejected(handler: Rejecting, error: BaseException) -> bool:
    """Return whether a message whose handler raised ``error`` is dead-lettered without another attempt.

    ``reject_on`` is checked before ``retry_on``. An exception group is rejected only if each exception in it would be.
    Never rejected are the exceptions in ``NEVER_REJECTED``, exceptions that were raised from one of them, and those
    that are not an ``Exception`` (SystemExit, KeyboardInterrupt, CancelledError); nor is ``RetryLater``.
    """
    if not handler.reject_on and handler.retry_on is None:
        return False
    if isinstance(error, RetryLater) or is_of_database(error):
        return False
    return all(_is_named(handler, one) for one in _leaves(error))


def is_of_database(error: BaseException) -> bool:
    """Return whether an exception has nothing to do with the message: a lost connection, a deadlock."""
    return any(isinstance(one, NEVER_REJECTED) for one in _with_causes(error))


def _is_named(handler: Rejecting, error: BaseException) -> bool:
    if not isinstance(error, Exception):
        return False
    if isinstance(error, handler.reject_on):
        return True
    return handler.retry_on is not None and not isinstance(error, handler.retry_on)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions of a group, and of groups in it, or the exception itself if it is not a group."""
    found = [error]
    while found:
        one = found.pop()
        if isinstance(one, BaseExceptionGroup):
            found += one.exceptions
        else:
            yield one


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, those in it if it is a group, and recursively the causes of all (``raise … from``)."""
    seen: set[int] = set()
    found: list[BaseException] = [error]
    while found:
        one = found.pop()
        if id(one) in seen:
            continue  # Causes may form a circle.
        seen.add(id(one))
        yield one
        if one.__cause__ is not None:
            found.append(one.__cause__)
        if isinstance(one, BaseExceptionGroup):
            found += one.exceptions
