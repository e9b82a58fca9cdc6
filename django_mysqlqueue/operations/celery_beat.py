"""Importing the schedules of django-celery-beat, from its tables: the package need not be installed any longer."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Unpack

from django.apps import apps
from django.conf import settings as django_settings
from django.db import DEFAULT_DB_ALIAS, connections, router
from django.utils.dateparse import parse_datetime
from django.utils.timezone import is_naive, make_aware, now
from django.utils.translation import gettext as _

from django_mysqlqueue.arguments import spelled_out
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.operations.declaring import How, operating
from django_mysqlqueue.operations.recurring import CREATE, create_recurring, import_tasks
from django_mysqlqueue.operations.results import ImportResult, result_of
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.schedules import editing
from django_mysqlqueue.schedules.definitions import QUEUE, SKIP
from django_mysqlqueue.text.humanize import shortened

APP = "django_celery_beat"
SECONDS = {"days": 86_400, "hours": 3600, "minutes": 60, "seconds": 1, "microseconds": 1e-6}
"""The units of intervals, in seconds."""
NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
"""What the name of a schedule may not have, unlike that of a periodic task."""

Row = Mapping[str, Any]


class _Tables(NamedTuple):
    """The rows of the tables; of the kinds of schedules by id."""

    tasks: list[Row]
    crontab: Mapping[int, Row]
    interval: Mapping[int, Row]
    clocked: Mapping[int, Row]


class _NotTaken(Exception):
    """A periodic task has no counterpart. The text says why."""


@spelled_out
def import_celery_beat(**how: Unpack[How]) -> ImportResult:
    """Create recurring schedules from the periodic tasks of django-celery-beat: intervals, crontabs and clocked ones.

    Their tables are only read. A periodic task is named in the result if it is not taken: because it is solar, because
    no module declares its task, or because it does not fit; or because there is a schedule with its name, so that the
    import can be run again. A task may have its name in Celery. Unique tasks get ``overlap="skip"``.

    Args:
        using: alias of the database with the tables (default: the router's choice, else ``"default"``). Where the
            schedules are created depends on the queues of their tasks.

    Raises:
        OperationRefused: the database does not have the tables.
    """
    with operating({**how, "using": None}) as (_using, _by, dry_run):
        pass  # Its errors are not about one of the periodic tasks.
    tables = _read(how.get("using") or _home())
    import_tasks()
    at_home: dict[str, Any] = {**how, "using": None}
    created: list[str] = []
    not_taken: list[str] = []
    sentences: list[str] = []
    warnings: list[str] = []
    for row in tables.tasks:
        label = shortened(str(row["name"]), most=200)
        try:
            name, options = _options(row, tables)
            if name in created:
                raise _NotTaken(_("another one has the name %(name)s here") % {"name": name})
            result = create_recurring(name, **options, **at_home)
        except (_NotTaken, OperationRefused) as error:
            not_taken.append(label)
            sentences.append(_("Not taken: %(name)s: %(error)s.") % {"name": label, "error": str(error).rstrip(".")})
            continue
        created.append(name)
        sentences.append(" ".join(result.summary))
        warnings += [f"{name}: {text}." for text in _differences(row)]
    if created:
        warnings.append(_("Stop Celery beat before the schedules run: it does not know that they are taken."))
    else:
        sentences.append(_("There is no periodic task that can be taken."))
    return result_of(
        ImportResult,
        CREATE,
        len(created),
        *sentences,
        dry_run=dry_run,
        warnings=tuple(warnings),
        created=tuple(created),
        not_taken=tuple(not_taken),
    )


def _home() -> str:
    if apps.is_installed(APP):
        return str(router.db_for_read(apps.get_model(APP, "PeriodicTask")))
    return DEFAULT_DB_ALIAS


def _read(using: str) -> _Tables:
    if using not in connections:
        raise OperationRefused(f"using {using!r}: DATABASES has no such alias")
    known = set(connections[using].introspection.table_names())

    def rows(table: str) -> Iterator[Row]:
        name = f"{APP}_{table}"
        if name not in known:
            if table == "clockedschedule":
                return  # Releases before 1.6 do not have it.
            raise OperationRefused(f"The database {using!r} has no table {name}: pass the one of django-celery-beat.")
        with connections[using].cursor() as cursor:
            # Releases have different columns.
            cursor.execute(f"SELECT * FROM {name}")
            columns = [column[0] for column in cursor.description]
            for values in cursor.fetchall():
                yield dict(zip(columns, values, strict=True))

    tasks = sorted(rows("periodictask"), key=lambda row: str(row["name"]))
    kinds = ("crontabschedule", "intervalschedule", "clockedschedule")
    return _Tables(tasks, *({row["id"]: row for row in rows(kind)} for kind in kinds))


def _options(row: Row, tables: _Tables) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of ``create_recurring`` for a periodic task."""
    times = _times(row, tables)
    if row.get("one_off") and "at" not in times:
        raise _NotTaken(_("it runs only once (one_off), but not at a given time"))
    if row.get("expires"):
        raise _NotTaken(_("it ends at a given time (expires)"))
    name = NO_NAME.sub("-", str(row["name"])).strip("-")
    return name, {
        "task": row["task"],
        "args": _json(row, "args", list),
        "kwargs": _json(row, "kwargs", dict),
        "enabled": bool(row["enabled"]),
        "overlap": SKIP if _is_unique(editing.path_of(row["task"])) else QUEUE,
        **times,
    }


def _is_unique(path: str) -> bool:
    """Return whether a task has one job at a time. The jobs of schedules are not compared with others."""
    return bool(editing.topic_of(path) and job_queues.option_of("unique", "", "", path))


def _times(row: Row, tables: _Tables) -> dict[str, Any]:
    kinds: dict[str, tuple[Mapping[int, Row], Callable[[Row, Row], dict[str, Any]]]] = {
        "crontab_id": (tables.crontab, _crontab),
        "interval_id": (tables.interval, _interval),
        "clocked_id": (tables.clocked, _clocked),
    }
    if row.get("solar_id") is not None:
        raise _NotTaken(_("there are no solar schedules here"))
    for column, (known, convert) in kinds.items():
        if row.get(column) is not None:
            if row[column] not in known:
                raise _NotTaken(_("its schedule is missing"))
            return convert(known[row[column]], row)
    raise _NotTaken(_("it has no schedule"))


def _crontab(crontab: Row, row: Row) -> dict[str, Any]:
    days, weekdays = (str(crontab[name]).replace(" ", "") for name in ("day_of_month", "day_of_week"))
    if not days.startswith("*") and not weekdays.startswith("*"):
        raise _NotTaken(
            _("of day_of_month %(days)r and day_of_week %(weekdays)r, Celery needs both, a cron line one")
            % {"days": days, "weekdays": weekdays}
        )
    start = _moment(row.get("start_time"))
    if start is not None and start > now():
        raise _NotTaken(_("its crontab begins later (start_time)"))
    fields = (crontab["minute"], crontab["hour"], days, crontab["month_of_year"], weekdays)
    line = " ".join(str(field).replace(" ", "") for field in fields)
    # Celery knows the names of days and months in full, too.
    line = re.sub(r"[A-Za-z]+", lambda found: found[0][:3].upper(), line)
    return {"cron": line, "timezone": str(crontab.get("timezone") or "UTC")}


def _interval(interval: Row, row: Row) -> dict[str, Any]:
    if interval["period"] not in SECONDS:
        raise _NotTaken(_("the unit %(unit)r of its interval is not known") % {"unit": interval["period"]})
    return {"every": interval["every"] * SECONDS[interval["period"]], "start": _moment(row.get("start_time"))}


def _clocked(clocked: Row, row: Row) -> dict[str, Any]:
    return {"at": _moment(clocked["clocked_time"])}


def _moment(value: Any) -> datetime.datetime | None:
    """Return a time of the tables, which SQLite stores as text, and MySQL without a time zone."""
    found = parse_datetime(value) if isinstance(value, str) else value
    if found is None or not is_naive(found):
        return found
    return make_aware(found, datetime.UTC if django_settings.USE_TZ else None)


def _json(row: Row, column: str, kind: type[Any]) -> Any:
    text = str(row.get(column) or "")
    try:
        found = json.loads(text) if text.strip() else kind()
    except ValueError as error:
        raise _NotTaken(f"{column}={shortened(text)!r}: must be JSON ({error})") from None
    if not isinstance(found, kind):
        raise _NotTaken(f"{column}={shortened(text)!r}: must be a JSON {'list' if kind is list else 'object'}")
    return found


def _differences(row: Row) -> Iterator[str]:
    """Yield what a periodic task has that its schedule does not have."""
    for column in ("queue", "exchange", "routing_key"):
        if row.get(column):
            yield _("%(column)s %(value)r is left out: its jobs go to the queue of the task") % {
                "column": column,
                "value": row[column],
            }
    if row.get("priority") is not None:
        yield _("the priority %(value)s is left out: its jobs have that of the task") % {"value": row["priority"]}
    if row.get("expire_seconds"):
        yield _("expire_seconds %(value)s is left out") % {"value": row["expire_seconds"]}
