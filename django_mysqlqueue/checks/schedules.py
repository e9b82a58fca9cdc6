"""System checks of recurring schedules."""

from __future__ import annotations

from typing import Any

from django.core import checks

from django_mysqlqueue.exceptions import InvalidMessage, SubscriberError
from django_mysqlqueue.options import conf
from django_mysqlqueue.schedules import registry as schedule_registry
from django_mysqlqueue.service import schedules
from django_mysqlqueue.subscriptions import registry


@checks.register("django_mysqlqueue")
def check_schedules(**kwargs: Any) -> list[checks.CheckMessage]:
    """Check that recurring schedules are declared correctly (E027); warn about tasks of other backends (W028)."""
    if conf.problems():
        return []  # reported by E001 to E006
    try:
        registry.discover()
    except SubscriberError:
        return []  # reported by E008
    found = schedule_registry.find()
    errors = list(found.errors)
    for name, definition in found.definitions.items():
        try:
            schedules.home_of(definition)
        except InvalidMessage as error:
            errors.append(f"Schedule {name!r}: {error}")
    return [
        *(checks.Error(text, id="django_mysqlqueue.E027") for text in errors),
        *(
            checks.Warning(
                f"{text} The schedule does not run.",
                hint="This is right where TASKS has another backend for development or tests.",
                id="django_mysqlqueue.W028",
            )
            for text in found.elsewhere
        ),
    ]
