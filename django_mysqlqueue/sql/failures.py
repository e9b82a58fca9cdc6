"""Texts for errors of the database, shared by commands, the dashboard, metrics and health checks."""

from __future__ import annotations

import traceback
from typing import Any

from django.db import DEFAULT_DB_ALIAS, Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.translation import gettext as _

from django_mysqlqueue.sql import FailureKind
from django_mysqlqueue.sql.connection import failure_kind


def kind_of(using: str, error: Error) -> FailureKind | None:
    """Return why the database refused or did not answer; None for other errors, such as a bug in a statement."""
    return failure_kind(connections[using], error)


def alias_of(error: Error) -> str | None:
    """Return the alias of the connection that raised an error; None if it was raised elsewhere."""
    for frame, _line in traceback.walk_tb(error.__traceback__):
        owner: Any = frame.f_locals.get("self")
        # Not isinstance: it would evaluate a lazy object, such as the user of a request.
        if issubclass(type(owner), BaseDatabaseWrapper):
            return str(owner.alias)
    return None


def explain(using: str, error: Error) -> str:
    """Return a sentence that names the database and the kind of the error, followed by the driver's text."""
    return f"{summarize(using, error)}: {error}"


def explain_silence(using: str, seconds: float) -> str:
    """Return the sentence for a database that has not answered within some seconds, and may still do."""
    text = _("The database %(alias)s does not answer: reading it took more than %(seconds)s seconds.")
    return text % {"alias": repr(using), "seconds": f"{seconds:g}"}


def summarize(using: str, error: Error) -> str:
    """Return the same without the driver's text, which may contain users and hosts, and without a period."""
    match kind_of(using, error):
        case "no_answer":
            text = _("The database %(alias)s does not answer")
        case "denied":
            text = _("The database %(alias)s refuses access to the user of DATABASES")
        case "no_database":
            text = _("The database that DATABASES names for %(alias)s does not exist")
        case "too_many_connections":
            text = _("The database %(alias)s accepts no more connections")
        case "read_only":
            text = _("The database %(alias)s is read-only")
        case "missing_table":
            text = _("The database %(alias)s lacks a table or column of the queue; run %(migrate)s")
        case "busy":
            text = _("The database %(alias)s is busy: another transaction holds a lock")
        case "interrupted":
            text = _("The database %(alias)s has interrupted a statement: it took too long, or was killed")
        case _:
            text = _("The database %(alias)s reports an error")
    return text % {"alias": repr(using), "migrate": migrate_command(using)}


def migrate_command(using: str) -> str:
    """Return the command that creates the queue's tables in a database."""
    return "manage.py migrate" + ("" if using == DEFAULT_DB_ALIAS else f" --database {using}")
