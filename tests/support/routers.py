"""Routers of projects with more than one database."""

from __future__ import annotations

from typing import Any

QUEUE = "django_mysqlqueue"


class QueueElsewhere:
    """The queue on an alias of its own, everything else on ``default``, as Django's documentation shows it."""

    def _alias(self, model: Any) -> str | None:
        return "queue" if model._meta.app_label == QUEUE else None

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return self._alias(model)

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return (db == "queue") == (app_label == QUEUE)


class ReadsFromReplica:
    """Every read goes to a replica, unless the code says ``using``."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "replica"

    def db_for_write(self, model: Any, **hints: Any) -> None:
        return None


class QueueKeptOut:
    """Nobody's: the queue's tables may be made nowhere."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if app_label == QUEUE else None
