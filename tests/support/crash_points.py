"""Crashes between two statements."""

from __future__ import annotations

from django.db import connection


class Crash(BaseException):
    """Ends an operation between two of its statements, as a SIGKILL would."""


def crash_points(operation, limit=60):
    """Runs ``operation`` so that it dies right after statement 1, 2, 3, …, until it gets through."""
    for survives in range(limit):
        count = 0

        def wrapper(execute, sql, params, many, context, survives=survives):
            nonlocal count
            result = execute(sql, params, many, context)
            count += not sql.startswith("BEGIN")  # SQLite's, which atomic() cannot undo from within
            if count > survives:
                raise Crash
            return result

        try:
            with connection.execute_wrapper(wrapper):
                operation()
        except Crash:
            yield survives
        else:
            return
    raise AssertionError("it never got through")
