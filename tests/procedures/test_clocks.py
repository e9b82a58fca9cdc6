"""Sessions with a time or a time zone of their own: procedures use the server's clock, and leave the session alone."""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid

import MySQLdb
import pytest
from django.core.management import call_command
from django.db import connection, models

from django_mysqlqueue.checks import system as checks
from django_mysqlqueue.models import MODELS, DeliveryEvent, PartitionLease
from django_mysqlqueue.options import conf
from tests.procedures import probes
from tests.support.harness import USING
from tests.support.internals import installing
from tests.support.internals import procedures as definitions
from tests.support.private_servers import alias_of, private_server
from tests.support.sql_clients import REF, Client, numbers, publish_numbers, refused, register

pytestmark = [pytest.mark.servers_only, pytest.mark.promise("Clocks", "Consumers in plain SQL")]

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])
SHIFTS = pytest.mark.parametrize("shift", [-86_400 * 365, -7200, 7200, 86_400 * 365])
SESSION = "@@SESSION.time_zone, @@SESSION.sql_mode, @@SESSION.character_set_client, @@SESSION.autocommit"
HOUR_MS = 3_600_000


def shifted(client, seconds):
    """The client's session has another time from now on."""
    client.run("SET timestamp = %s", time.time() + seconds)
    return client


def written_times():
    """Every time that is stored in a table of the queue, by table and column."""
    for model in MODELS:
        columns = [
            field.attname
            for field in model._meta.get_fields()
            if isinstance(field, models.BigIntegerField)
            and (field.attname.endswith("_at") or field.attname == "invisible_until")
        ]
        for row in model.objects.values(*columns):
            yield from ((f"{model._meta.db_table}.{column}", at) for column, at in row.items() if at)


@MODES
@SHIFTS
def test_a_consumer_whose_session_is_in_another_time_takes_nothing_from_others(connect, mode, shift):
    register(mode)
    publish_numbers(6)
    owner, other = connect(), shifted(connect(), shift)
    assert numbers(owner.claim()) == [0, 3, 1, 4, 2, 5]
    owners = set(PartitionLease.objects.values_list("partition_key", "leased_by"))
    assert other.claim() == []
    assert set(PartitionLease.objects.values_list("partition_key", "leased_by")) == owners


@MODES
@SHIFTS
def test_nothing_is_taken_from_a_consumer_whose_session_is_in_another_time(connect, mode, shift):
    register(mode)
    publish_numbers(6)
    owner, other = shifted(connect(), shift), connect()
    rows = owner.claim()
    assert len(rows) == 6
    assert all(abs(row["invisible_until"] - time.time() * 1000) < HOUR_MS / 2 for row in rows)
    assert other.claim() == []
    assert owner.extend(rows[0]["handle"]) == "extended"
    assert other.claim() == []
    assert [owner.ack(row["handle"]) for row in rows] == ["acked"] * 6


@MODES
@SHIFTS
def test_no_call_writes_the_time_of_the_session(client, mode, shift, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "RECORD_DELIVERIES": "all"}
    installing.install(USING)
    register(mode)
    publish_numbers(8, keys=8, expires_in=60)
    shifted(client, shift)
    rows = client.claim()
    assert len(rows) == 8
    handles = iter(row["handle"] for row in rows)
    assert client.ack(next(handles)) == "acked"
    assert client.nack(next(handles)) == "failed"
    assert client.nack(next(handles), delay=5) == "failed"
    assert client.reject(next(handles)) == "dead_lettered"
    assert client.snooze(next(handles), 5) == "snoozed"
    assert client.extend(next(handles)) == "extended"
    with client.transaction():
        assert client.reject(next(handles)) == "dead_lettered"
    client.claim()  # It moves the watermark for the last one.
    # The counts of an hour have the time when it began.
    assert {name for name, at in written_times() if abs(at - time.time() * 1000) > 1.1 * HOUR_MS} == set()
    assert DeliveryEvent.objects.count() == 6


@contextlib.contextmanager
def zone_whose_clock_is_set_back(at):
    """A time zone of this server whose clocks are set back by an hour at some time (in seconds)."""
    name = f"Test/{uuid.uuid4()}"
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO mysql.time_zone (Use_leap_seconds) VALUES ('N')")
        zone = cursor.lastrowid
        tables = {
            "time_zone_name (Name, Time_zone_id)": [(name, zone)],
            "time_zone_transition_type (Time_zone_id, Transition_type_id, `Offset`, Is_DST, Abbreviation)": [
                (zone, 0, 7200, 1, "S"),
                (zone, 1, 3600, 0, "W"),
            ],
            "time_zone_transition (Time_zone_id, Transition_time, Transition_type_id)": [(zone, 0, 0), (zone, at, 1)],
        }
        for table, rows in tables.items():
            marks = ", ".join(["%s"] * len(rows[0]))
            cursor.executemany(f"INSERT INTO mysql.{table} VALUES ({marks})", rows)
        try:
            yield name
        finally:
            for table in ("time_zone_name", "time_zone_transition_type", "time_zone_transition", "time_zone"):
                cursor.execute(f"DELETE FROM mysql.{table} WHERE Time_zone_id = %s", (zone,))


@MODES
@pytest.mark.parametrize("minutes", [-20, 20], ids=["the second time", "the first time"])
def test_the_hour_that_daylight_saving_time_repeats_is_as_others(connect, mode, minutes):
    register(mode)
    publish_numbers(3)
    with zone_whose_clock_is_set_back(int(time.time()) + 60 * minutes) as name:
        owner = shifted(connect(), -HOUR_MS / 1000)
        owner.run("SET time_zone = %s", name)
        # As texts: from 11.7 on, MariaDB compares the moments.
        texts = "CAST(FROM_UNIXTIME(%s) AS CHAR) = CAST(FROM_UNIXTIME(%s) AS CHAR)"
        (row,) = owner.run(f"SELECT {texts} AS same", *twice(minutes))
        assert row["same"]  # Local times of this hour name two moments.
        rows = owner.claim()
        assert len(rows) == 3
        assert all(abs(row["invisible_until"] - time.time() * 1000) < HOUR_MS / 2 for row in rows)
        assert connect().claim() == []
        assert owner.run("SELECT @@SESSION.time_zone AS zone") == [{"zone": name}]


def twice(minutes):
    """Two moments, an hour apart, of which now is one, around the time when the clock is set back."""
    now = int(time.time())
    return (now, now - 3600) if minutes < 0 else (now, now + 3600)


@pytest.mark.parametrize("zone", ["+00:00", "-03:30", "SYSTEM"])
def test_no_call_changes_the_session(client, zone):
    register("shared")
    publish_numbers(6, keys=6)
    client.run("SET time_zone = %s", zone)
    shifted(client, 3600)
    what = f"SELECT {SESSION}, @@SESSION.timestamp AS at, NOW(6) AS now"
    before = client.run(what)
    handles = iter(row["handle"] for row in client.claim(5))
    client.ack(next(handles))
    client.nack(next(handles))
    client.reject(next(handles))
    client.snooze(next(handles), 1)
    client.extend(next(handles))
    refused(client, "nosuch", "t", 1)
    refused(client, "g", "t", "x", statement="CALL queue_ack(%s, %s, %s)")
    assert client.run(what) == before
    client.run("SET timestamp = DEFAULT")
    client.claim()
    (first,) = client.run("SELECT NOW(6) AS now")
    (second,) = client.run("SELECT NOW(6) AS now")
    assert first["now"] < second["now"]


@pytest.mark.parametrize("query", [True, False], ids=["statement", "nothing"])
def test_a_call_that_is_killed_leaves_the_sessions_time_zone(procedures, query):
    probes.install()
    register("shared")
    for step in range(1, 30):
        publish_numbers(1)
        client = Client()
        client.run("SET time_zone = '-03:30', @queue_step = 0, @queue_query = TRUE, @queue_kill = %s", step * query)
        with contextlib.suppress(MySQLdb.Error):
            client.claim(1)
        assert client.run("SELECT @@SESSION.time_zone AS zone") == [{"zone": "-03:30"}]
        client.close()


def test_procedures_without_the_hint_of_the_clock_are_refused(client):
    """Some clients strip comments, of which the hint is one; on MariaDB it is part of the statement."""
    (clock,) = (one for one in installing.wanted(USING) if one.name == "queue__clock")
    without = re.sub(r"/\*.*?\*/|SET STATEMENT .*? FOR ", "", clock.sql)
    with connection.cursor() as cursor:
        cursor.execute("DROP PROCEDURE queue__clock")
        cursor.execute(without)
    register("shared")
    client.run("SET time_zone = '+05:00'")
    assert "created without their comments" in refused(client, *REF, 1)
    installing.install(USING)


@pytest.mark.parametrize("mariadb", [True, False])
def test_no_procedure_reads_the_clock_of_the_session(mariadb):
    for one in definitions(conf.get_settings(), [], mariadb=mariadb):
        assert not re.search(r"\b(NOW|UTC_\w+|CURRENT_\w+|UNIX_TIMESTAMP|LOCALTIME\w*|CURDATE|CURTIME)\b", one.sql)
        assert ("SYSDATE" in one.sql) == (one.name == "queue__clock")


def test_a_server_whose_sysdate_is_that_of_the_session_is_found(db, settings, capsys):
    with private_server("--sysdate-is-now") as server, alias_of(server, "sysdate") as alias:
        settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "DATABASE": alias}
        assert checks.check_procedures(databases=[alias]) == []  # Nobody consumes there.
        call_command("queueprocedures")
        assert "--sysdate-is-now" in capsys.readouterr().err
        (found,) = checks.check_procedures(databases=[alias])
        assert found.id == "django_mysqlqueue.W029"
        call_command("queueprocedures", "--check", "--format", "json")
        assert json.loads(capsys.readouterr().out)["sysdate_is_now"] is True
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "DATABASE": USING}
    call_command("queueprocedures")
    assert capsys.readouterr().err == ""
    assert checks.check_procedures(databases=[USING]) == []
