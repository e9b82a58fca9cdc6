"""The tables of django-celery-beat, as its releases make them, without the package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from django.db import connection

TABLES = {
    "crontabschedule": "minute VARCHAR(240), hour VARCHAR(96), day_of_week VARCHAR(64), day_of_month VARCHAR(124), "
    "month_of_year VARCHAR(64), timezone VARCHAR(63)",
    "intervalschedule": "every INTEGER, period VARCHAR(24)",
    "solarschedule": "event VARCHAR(24), latitude DECIMAL(9,6), longitude DECIMAL(9,6)",
    "clockedschedule": "clocked_time DATETIME",
    "periodictask": "name VARCHAR(200), task VARCHAR(200), args TEXT, kwargs TEXT, queue VARCHAR(200), exchange "
    "VARCHAR(200), routing_key VARCHAR(200), expires DATETIME, enabled BOOL, one_off BOOL, start_time DATETIME, "
    "priority INTEGER, expire_seconds INTEGER, crontab_id INTEGER, interval_id INTEGER, solar_id INTEGER, "
    "clocked_id INTEGER",
}


def execute(statement: str, *values: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)


@contextlib.contextmanager
def there() -> Iterator[None]:
    """Makes the tables, and drops them."""
    try:
        for name, columns in TABLES.items():
            execute(f"CREATE TABLE django_celery_beat_{name} (id INTEGER PRIMARY KEY, {columns})")
        yield
    finally:
        for name in TABLES:
            execute(f"DROP TABLE IF EXISTS django_celery_beat_{name}")
