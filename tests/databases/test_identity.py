"""Which database is it: what the settings can say, and what only a connection can."""

from __future__ import annotations

import os
import re
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.core.checks import Tags, run_checks
from django.core.management import CommandError, call_command
from django.core.management.base import SystemCheckError
from django.db import connection, connections

from django_mysqlqueue import publish, subscriber
from django_mysqlqueue.checks import system as checks
from django_mysqlqueue.models import Sequencer
from tests.support.harness import in_thread
from tests.support.internals import database_name, identify, sequence
from tests.support.queue_alias import command

QUEUE, AGAIN = "queue", "again"


@pytest.fixture
def another(queue_db, settings, request):
    """Makes an alias that leads to the database of another one, with other words in ``DATABASES``."""

    def make(of=QUEUE, alias=AGAIN, **changes):
        database = {**connections[of].settings_dict, **changes}
        connections.settings[alias] = connections.configure_settings({"default": database})["default"]
        request.addfinalizer(lambda: forget(alias))
        settings.MYSQLQUEUE = {"TOPICS": {"a": {"DATABASE": QUEUE}, "b": {"DATABASE": alias}}}
        return alias

    def forget(alias):
        # A pass of a relay may last longer than its subscriber. At its end it closes what ``DATABASES`` names.
        for thread in threading.enumerate():
            if thread.name.startswith(f"mysqlqueue-relay-{alias}-"):
                thread.join(60)
                assert not thread.is_alive()
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]

    return make


@pytest.fixture
def spelled(another, tmp_path):
    """A second alias of the database ``queue``, of which the settings do not say that it is the same."""
    name = connections[QUEUE].settings_dict["NAME"]
    if connection.vendor == "sqlite":
        folder, file = os.path.split(os.path.abspath(name))
        return another(NAME=f"{folder}/./{file}")
    return another(**in_file(tmp_path / "queue.cnf", name))


def in_file(path, name):
    """Settings that leave the name of the database to an option file."""
    path.write_text(f"[client]\ndatabase = {name}\n")
    options = {**connections[QUEUE].settings_dict["OPTIONS"], "read_default_file": str(path)}
    return {"NAME": "", "OPTIONS": options}


def found(*databases):
    messages = run_checks(tags=["django_mysqlqueue", Tags.database], databases=databases)
    return [one for one in messages if one.id == "django_mysqlqueue.E024"]


@pytest.mark.parametrize("databases", [[QUEUE, AGAIN], [QUEUE], [AGAIN]])
def test_a_connection_tells_that_two_aliases_are_one_database(spelled, databases):
    assert checks.check_databases() == [], "without a connection nobody can know"
    assert found(*databases) == [], "a flushed database has no log"
    identify(QUEUE)
    (error,) = found(*databases)
    assert error.msg.startswith("The databases 'queue' and 'again' of the queue have the same log: ")
    assert found("default") == []


def test_migrate_and_subscribers_refuse_them(spelled, no_handlers):
    subscriber("b", group="g")(lambda delivery: None)
    identify(QUEUE)
    with pytest.raises(SystemCheckError, match=r"E024\) The databases 'queue' and 'again' of the queue have the same"):
        call_command("migrate", "django_mysqlqueue", database=spelled, skip_checks=False, verbosity=0)
    with pytest.raises(CommandError, match=r"'(queue|again)' and '(queue|again)' of the queue have the same log"):
        command("runsubscriber", "--drain")
    command("runsubscriber", "--drain", "--database", spelled)


def test_the_advice_makes_a_copy_a_log_of_its_own(queue_db, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"a": {"DATABASE": QUEUE}}}
    Sequencer.objects.using(QUEUE).create(pk=1, log_id=identify("default"))
    (error,) = found("default", QUEUE)
    statement = re.search(r"UPDATE .*", error.hint)[0]
    with connections[QUEUE].cursor() as cursor:
        cursor.execute(statement)
    assert found("default", QUEUE) == []
    assert identify(QUEUE) != identify("default")


def test_a_log_has_an_id_from_its_creation(queue_db):
    """A flushed database gets one with its first message, or when somebody asks for it."""
    publish("t", 1)
    sequence("default")
    assert uuid.UUID(Sequencer.objects.get().log_id)
    assert identify("default") == Sequencer.objects.get().log_id
    assert uuid.UUID(identify(QUEUE))
    assert identify(QUEUE) == Sequencer.objects.using(QUEUE).get().log_id != identify("default")


def test_a_log_without_a_row_gets_one_id_from_several_at_once(queue_db):
    """As in a flushed database, and with the tables of ``sqlmigrate``."""
    assert not Sequencer.objects.exists()
    with ThreadPoolExecutor(4) as pool:
        ids = {one.result() for one in [pool.submit(in_thread, lambda: identify("default")) for _ in range(4)]}
    assert ids == {Sequencer.objects.get().log_id}
    assert uuid.UUID(*ids)


def test_empty_ids_are_not_compared(queue_db, settings, no_handlers, monkeypatch):
    for topic in ("a", "b"):
        subscriber(topic, group="g")(lambda delivery: None)
    settings.MYSQLQUEUE = {"TOPICS": {"b": {"DATABASE": QUEUE}}}
    monkeypatch.setattr("django_mysqlqueue.management.commands.runsubscriber.identify", lambda using: "")
    command("runsubscriber", "--drain")


def test_a_database_that_does_not_answer_hides_no_other(spelled, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"a": {"DATABASE": "other"}, "b": {"DATABASE": QUEUE}, "c": {"DATABASE": AGAIN}}}
    identify(QUEUE)
    assert len(found(QUEUE)) == 1


# -- names in option files --------------------------------------------------------


@pytest.mark.servers_only
def test_two_databases_whose_names_are_in_option_files_are_two(another, tmp_path):
    name = connection.settings_dict["NAME"]
    another("default", "one", **in_file(tmp_path / "one.cnf", name))
    another(QUEUE, "two", **in_file(tmp_path / "two.cnf", connections[QUEUE].settings_dict["NAME"]))
    for alias in ("default", QUEUE):
        identify(alias)
    connections.settings["one"]["OPTIONS"]["read_default_group"] = "client"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "queue_aliases", lambda: ["one", "two"])
        patch.setattr("tests.support.internals.databases.queue_aliases", lambda: ["one", "two"])
        assert checks.check_databases() == []
        assert found("one", "two") == []


@pytest.mark.servers_only
@pytest.mark.parametrize("option", ["database", "db"])
def test_a_name_in_options_is_the_name(another, option):
    """It takes precedence over ``NAME``."""
    name = connections[QUEUE].settings_dict["NAME"]
    options = {**connections[QUEUE].settings_dict["OPTIONS"], option: name}
    another(OPTIONS=options, NAME="")
    assert database_name(connections[AGAIN]) == name
    (error,) = checks.check_databases()
    assert error.msg == "The databases 'queue' and 'again' of the queue are the same one."


@pytest.mark.servers_only
def test_grants_and_the_banner_have_the_name_that_the_server_says(another, tmp_path, no_handlers):
    subscriber("b", group="g")(lambda delivery: None)
    name = connections[QUEUE].settings_dict["NAME"]
    alias = another(**in_file(tmp_path / "queue.cnf", name))
    printed = command("queuegrants", "--role", "reader", "--database", alias)
    assert f" ON `{name}`.`queue_outbox` TO " in printed
    assert f"database  again ({connection_kind()}: {name})" in command("runsubscriber", "--drain", "--database", alias)


def connection_kind():
    return "mariadb" if connection.mysql_is_mariadb else "mysql"


@pytest.mark.servers_only
def test_grants_for_a_user_that_the_server_does_not_let_in(another):
    """The statements may be those that will let it in."""
    name = connections[QUEUE].settings_dict["NAME"]
    alias = another(USER="nobody", PASSWORD="wrong")  # noqa: S106
    assert f" ON `{name}`.`queue_outbox` TO " in command("queuegrants", "--role", "reader", "--database", alias)
    connections.settings[alias]["NAME"] = ""
    with pytest.raises(CommandError, match="The database 'again' refuses access"):
        command("queuegrants", "--role", "reader", "--database", alias)


@pytest.mark.servers_only
def test_grants_without_any_database(another):
    alias = another(NAME="")
    with pytest.raises(CommandError, match=r"The connection to 'again' is on no database: DATABASES\['again'\] has no"):
        command("queuegrants", "--role", "reader", "--database", alias)
