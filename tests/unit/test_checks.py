"""System checks: every id, its hint, and that a broken setting breaks no other check."""

import contextlib
import types

import pytest
from django.core import checks as django_checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import ProgrammingError, connection, connections

from django_mysqlqueue import subscriber
from django_mysqlqueue.checks import system as checks
from django_mysqlqueue.models import ConsumerGroup, OutboxMessage, QueueMessage
from tests.support.internals import GroupRef, groups


def ids(found):
    return [message.id for message in found]


def run(**kwargs):
    return [
        message
        for message in django_checks.run_checks(tags=["django_mysqlqueue"], **kwargs)
        if message.id.startswith("django_mysqlqueue.")
    ]


# -- the setting --------------------------------------------------------------


def test_sound_settings_pass():
    assert run() == []


@pytest.mark.parametrize(
    ("value", "check_id", "hint"),
    [
        (7, "E001", None),
        ({"TREADS": 1}, "E002", "Did you mean THREADS?"),
        ({"THREADS": "1"}, "E003", "The default is 4."),
        ({"LEASE_RENEWAL_INTERVAL": 30}, "E004", "Use about a third of LEASE_DURATION."),
        ({"TOPICS": {"t": {"RETENTON": 1}}}, "E005", "Did you mean RETENTION?"),
        ({"GROUPS": {"g": {"MOD": 1}}}, "E006", "Did you mean MODE?"),
    ],
)
def test_settings_errors(settings, value, check_id, hint):
    settings.MYSQLQUEUE = value
    (error,) = run()
    assert error.id == f"django_mysqlqueue.{check_id}"
    assert error.level == django_checks.ERROR
    assert error.hint == hint
    assert "MYSQLQUEUE" in error.msg


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere.redact", "No module named 'nowhere'"),
        ("tests.support.factories.nothing", 'does not define a "nothing"'),
        ("tests.settings.SECRET_KEY", "of type str, not a function"),
    ],
)
def test_a_redact_that_leads_nowhere(settings, path, says):
    settings.MYSQLQUEUE = {"REDACT": path}
    (error,) = run()
    assert (error.id, error.level) == ("django_mysqlqueue.E016", django_checks.ERROR)
    assert repr(path) in error.msg
    assert says in error.msg
    assert "(text, topic, kind)" in error.hint


@pytest.mark.parametrize("hook", [None, str.upper, "django.utils.html.escape"])
def test_a_redact_that_can_be_called(settings, hook):
    settings.MYSQLQUEUE = {"REDACT": hook}
    assert run() == []


def test_manage_check_fails_on_a_bad_setting(settings):
    settings.MYSQLQUEUE = {"THREADS": 0}
    with pytest.raises(SystemCheckError, match=r"django_mysqlqueue\.E003"):
        call_command("check", "--tag", "django_mysqlqueue")


def test_ids_are_unique_and_stable(settings):
    """Projects silence checks by id."""
    settings.MYSQLQUEUE = {
        "TREADS": 1,
        "THREADS": "1",
        "LEASE_RENEWAL_INTERVAL": 30,
        "TOPICS": 1,
        "GROUPS": 1,
    }
    assert ids(run()) == [f"django_mysqlqueue.E00{number}" for number in (2, 3, 4, 5, 6)]
    settings.SILENCED_SYSTEM_CHECKS = [f"django_mysqlqueue.E00{number}" for number in (2, 3, 4, 5, 6)]
    call_command("check", "--tag", "django_mysqlqueue")


# -- the router ---------------------------------------------------------------


class SplitRouter:
    """Sends one of the queue's tables elsewhere."""

    def db_for_write(self, model, **hints):
        return "other" if model._meta.db_table == "queue_offsets" else None


class WholeRouter:
    def db_for_write(self, model, **hints):
        return "other" if model._meta.app_label == "django_mysqlqueue" else None


def test_split_tables(settings):
    settings.DATABASE_ROUTERS = [SplitRouter()]
    (error,) = checks.check_router()
    assert error.id == "django_mysqlqueue.E007"
    assert "default, other" in error.msg
    assert "to one database" in error.hint


def test_every_table_counts_for_the_split(settings):
    """A table that the check forgot could be routed away unseen."""
    from django.apps import apps

    assert set(checks.MODELS) == {
        model
        for model in apps.get_app_config("django_mysqlqueue").get_models()
        if not model._meta.proxy and model._meta.managed
    }


def test_tables_that_move_together(settings):
    settings.DATABASE_ROUTERS = [WholeRouter()]
    assert checks.check_router() == []


# -- SQLite's options ---------------------------------------------------------

GOOD = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 30,
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
}


@pytest.fixture
def sqlite_options(settings, monkeypatch):
    """Sets the OPTIONS of the alias ``other``, which is SQLite on every engine, and checks them."""
    settings.MYSQLQUEUE = {"DATABASE": "other"}

    def check(options):
        monkeypatch.setitem(connections["other"].settings_dict, "OPTIONS", options)
        return checks.check_sqlite_options()

    return check


@pytest.mark.parametrize(
    "options", [GOOD, {**GOOD, "init_command": "pragma synchronous = normal;PRAGMA journal_mode = wal"}]
)
def test_good_sqlite_options(sqlite_options, options):
    assert sqlite_options(options) == []


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, ["transaction_mode", "timeout", "init_command"]),
        ({**GOOD, "transaction_mode": "DEFERRED"}, ["transaction_mode"]),
        ({**GOOD, "timeout": 5}, ["timeout"]),
        ({**GOOD, "init_command": "PRAGMA journal_mode=WAL"}, ["init_command"]),
        ({**GOOD, "init_command": "PRAGMA synchronous=NORMAL"}, ["init_command"]),
    ],
)
def test_missing_sqlite_options(sqlite_options, options, wanted):
    (warning,) = sqlite_options(options)
    assert warning.id == "django_mysqlqueue.W010"
    assert warning.level == django_checks.WARNING
    assert "'other'" in warning.msg
    for name in GOOD:
        assert (f"'{name}'" in warning.hint) == (name in wanted)


# -- the server ---------------------------------------------------------------


class FakeConnection:
    """A server as the checks see it."""

    def __init__(self, vendor="mysql", version=(11, 4, 2), mariadb=True, variables=(), tables=()):
        self.alias = "default"
        self.vendor = vendor
        self.mysql_version = version
        self.mysql_is_mariadb = mariadb
        self.Database = types.SimpleNamespace(sqlite_version_info=version)
        self.settings_dict = {"NAME": "queue"}
        self._answers = {"SHOW": list(variables), "SELECT": list(tables)}

    def cursor(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def execute(self, sql, parameters=()):
        self._rows = self._answers[sql.split()[0]]

    def fetchall(self):
        return self._rows


@pytest.fixture
def problems(monkeypatch):
    def look(**server):
        monkeypatch.setattr(checks, "connections", {"default": FakeConnection(**server)})
        return list(checks.server_problems("default"))

    return look


@pytest.mark.parametrize(
    ("vendor", "mariadb", "oldest", "too_old"),
    [
        ("mysql", True, (10, 11, 0), (10, 10, 99)),
        ("mysql", True, (11, 0, 1), (10, 6, 22)),
        ("mysql", False, (8, 0, 19), (8, 0, 18)),
        ("mysql", False, (9, 0, 0), (5, 7, 44)),
        ("sqlite", False, (3, 35, 0), (3, 34, 1)),
    ],
)
def test_versions(problems, vendor, mariadb, oldest, too_old):
    assert problems(vendor=vendor, mariadb=mariadb, version=oldest) == []
    (problem,) = problems(vendor=vendor, mariadb=mariadb, version=too_old)
    name = "sqlite" if vendor == "sqlite" else "mariadb" if mariadb else "mysql"
    assert f"runs {name} {'.'.join(map(str, too_old))}" in problem
    assert "or later is required" in problem


@pytest.mark.parametrize(
    ("version", "mariadb", "warns"),
    [
        ((8, 0, 18), False, False),  # an error instead
        ((8, 0, 19), False, True),
        ((8, 0, 43), False, True),
        ((8, 3, 0), False, True),
        ((8, 4, 0), False, False),
        ((9, 7, 0), False, False),
        ((10, 11, 0), True, False),
    ],
)
def test_an_untested_version_is_warned_of(monkeypatch, version, mariadb, warns):
    server = FakeConnection(version=version, mariadb=mariadb)
    monkeypatch.setattr(checks, "connections", {"default": server})
    monkeypatch.setattr(checks.sessions, "sound", lambda alias: contextlib.nullcontext())
    found = checks.check_tested_version(databases=["default"])
    assert ids(found) == ["django_mysqlqueue.W018"] * warns
    if warns:
        assert found[0].level == django_checks.WARNING
        assert f"runs mysql {'.'.join(map(str, version))}, on which" in found[0].msg
        assert "on 8.4 and later" in found[0].hint
    assert checks.check_tested_version(databases=["other"]) == []


@pytest.mark.parametrize("vendor", ["postgresql", "oracle"])
def test_unsupported_engine(problems, vendor):
    (problem,) = problems(vendor=vendor)
    assert f"runs on {vendor}" in problem
    assert "needs MySQL, MariaDB or SQLite" in problem


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ([("wsrep_on", "ON")], "Galera"),
        ([("wsrep_on", "OFF"), ("binlog_format", "ROW"), ("log_bin", "ON")], None),
        ([("binlog_format", "STATEMENT"), ("log_bin", "ON")], "binlog_format=STATEMENT"),
        ([("BINLOG_FORMAT", "statement"), ("LOG_BIN", "on")], "binlog_format=STATEMENT"),
        ([("binlog_format", "STATEMENT"), ("log_bin", "OFF")], None),
        ([("binlog_format", "MIXED"), ("log_bin", "ON")], None),
        ([], None),
    ],
)
@pytest.mark.parametrize("mariadb", [True, False])
def test_server_variables(problems, mariadb, variables, said):
    found = problems(variables=variables, mariadb=mariadb)
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_every_table_must_be_innodb(problems):
    found = problems(tables=[("queue_messages", "InnoDB"), ("queue_outbox", "MyISAM"), ("queue_offsets", "Aria")])
    assert len(found) == 2
    assert "queue_outbox" in found[0]
    assert "MyISAM" in found[0]
    assert "queue_offsets" in found[1]


def test_all_problems_at_once(problems):
    found = problems(
        version=(10, 5, 0), variables=[("wsrep_on", "ON"), ("binlog_format", "STATEMENT"), ("log_bin", "ON")]
    )
    assert len(found) == 3


def test_database_check_speaks_only_of_the_queues_database(monkeypatch, settings):
    monkeypatch.setattr(checks, "server_problems", lambda alias: [f"{alias} is bad"])
    assert checks.check_database() == []
    assert checks.check_database(databases=None) == []
    assert checks.check_database(databases=["other"]) == []
    (error,) = checks.check_database(databases=["default", "other"])
    assert (error.id, error.msg) == ("django_mysqlqueue.E011", "default is bad")
    settings.MYSQLQUEUE = {"DATABASE": "other"}
    (error,) = checks.check_database(databases=["default", "other"])
    assert error.msg == "other is bad"


def test_the_routers_database_is_checked(monkeypatch, settings):
    monkeypatch.setattr(checks, "server_problems", lambda alias: [f"{alias} is bad"])
    settings.DATABASE_ROUTERS = [WholeRouter()]
    assert [error.msg for error in checks.check_database(databases=["default", "other"])] == ["other is bad"]


@pytest.mark.parametrize("value", [7, {"DATABASE": "nowhere"}, {"THREADS": 0}])
def test_a_broken_setting_does_not_break_the_other_checks(settings, value):
    settings.MYSQLQUEUE = value
    assert checks.check_sqlite_options() == []
    assert checks.check_database(databases=["default"]) == []
    assert checks.check_router() == []


def test_a_router_to_an_unknown_alias_does_not_break_the_checks(settings):
    class Nowhere:
        def db_for_write(self, model, **hints):
            return "nowhere"

    settings.DATABASE_ROUTERS = [Nowhere()]
    assert checks.check_sqlite_options() == []
    assert checks.check_database(databases=["default"]) == []


# -- the database under test --------------------------------------------------


def test_the_engine_under_test_passes(db):
    found = django_checks.run_checks(tags=[django_checks.Tags.database], databases=["default"])
    assert [message for message in found if message.id.startswith("django_mysqlqueue")] == []


def test_the_real_version_is_read(db, engine, monkeypatch):
    """Against a minimum that no server reaches: the number in the message is the server's own."""
    monkeypatch.setitem(checks.MINIMUM, engine, (99, 9))
    found = django_checks.run_checks(tags=[django_checks.Tags.database], databases=["default"])
    (error,) = [message for message in found if message.id == "django_mysqlqueue.E011"]
    with connection.cursor() as cursor:
        cursor.execute("SELECT sqlite_version()" if engine == "sqlite" else "SELECT VERSION()")
        (version,) = cursor.fetchone()
    assert f"runs {engine} {'.'.join(version.split('-')[0].split('.')[:3])}; 99.9 or later" in error.msg


@pytest.mark.servers_only
def test_a_table_of_another_engine_is_found(db):
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE queue_sequencer ENGINE=MyISAM")
        try:
            found = list(checks.server_problems("default"))
        finally:
            cursor.execute("ALTER TABLE queue_sequencer ENGINE=InnoDB")
    assert len(found) == 1
    assert "queue_sequencer" in found[0]
    assert "MyISAM" in found[0]


# -- EAGER, RUN_IN_SERVER -----------------------------------------------------


@pytest.mark.parametrize(("value", "expected"), [(True, ["django_mysqlqueue.W012"]), (False, [])])
def test_eager_is_for_development(settings, value, expected):
    settings.MYSQLQUEUE = {"EAGER": value}
    found = checks.check_eager()
    assert [message.id for message in found] == expected


@pytest.mark.parametrize(("value", "expected"), [(True, ["django_mysqlqueue.W033"]), (False, [])])
def test_a_subscriber_beside_runserver_is_for_development(settings, value, expected):
    settings.MYSQLQUEUE = {"RUN_IN_SERVER": value}
    assert ids(checks.check_run_in_server()) == expected


# -- the setting's name and database ------------------------------------------


@pytest.mark.parametrize("name", ["MYSQL_QUEUE", "DJANGO_MYSQLQUEUE"])
def test_a_setting_of_a_similar_name_is_told_of(settings, name):
    assert ids(checks.check_settings_name()) == []
    setattr(settings, name, {"THREADS": 1})
    (warning,) = checks.check_settings_name()
    assert warning.id == "django_mysqlqueue.W013"
    assert name in warning.msg


def test_a_bell_that_cannot_work_is_warned_of(settings, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("b")

    def warning(**bell):
        settings.MYSQLQUEUE = {"BELL": {"DIRECTORY": str(tmp_path / "b"), **bell}}
        return [one.msg for one in checks.check_bell() if one.id == "django_mysqlqueue.W032"]

    assert warning() == []
    assert not (tmp_path / "b").exists(), "a check makes nothing: it may be run by another user"
    assert "no group 'nobody-has-this'" in warning(GROUP="nobody-has-this")[0]
    assert "bytes, at most 107 work" in warning(DIRECTORY=f"/{'long' * 25}")[0]
    (tmp_path / "b").mkdir()
    (tmp_path / "b").chmod(0o777)
    assert "can be written to by every user" in warning()[0]
    (tmp_path / "file").touch()
    assert "is not a directory" in warning(DIRECTORY=str(tmp_path / "file"))[0]
    settings.MYSQLQUEUE = {"BELL": None}
    assert checks.check_bell() == []


def test_the_models_look_into_the_queues_database(settings):
    """Without a router too: a row written to the default database's unused tables would never be handled."""
    assert OutboxMessage.objects.all().db == "default"
    settings.MYSQLQUEUE = {"DATABASE": "other"}
    assert OutboxMessage.objects.all().db == "other"
    assert QueueMessage.objects.filter(topic="t").db == "other"
    assert QueueMessage.objects.using("default").db == "default"
    assert QueueMessage.objects.db_manager("default").all().db == "default"


def test_an_ignored_override_is_warned_of(db, no_handlers):
    subscriber("t", group="g")(lambda delivery: None)
    ref = GroupRef("g", "t")
    groups.register("default", ref, mode="ordered", start="earliest")
    assert checks.check_overrides(databases=["default"]) == []
    values = {"timeout": 5, "prefetch": 5}
    ConsumerGroup.objects.update(
        overrides={name: {"value": value, "at": 1000, "by": "bob"} for name, value in values.items()}
    )
    (found,) = checks.check_overrides(databases=["default"])
    assert checks.check_overrides(databases=["other"]) == checks.check_overrides() == []

    assert (found.id, found.level) == ("django_mysqlqueue.W019", django_checks.WARNING)
    assert "timeout of the group 'g' on topic 't' is overridden with 5s, but subscribers ignore that" in found.msg
    assert "requires an async handler" in found.msg
    assert found.hint == "Remove it: manage.py queueset g t --unset timeout"


def test_a_filter_that_cannot_be_parsed_is_not_called_ignored(db, no_handlers):
    """Nor is the registered one reported if an override replaces it."""
    subscriber("t", group="g", filter={"region": ["eu"]})(lambda delivery: None)
    unknown = {"region": [{"sounds-like": "eu"}]}
    groups.register("default", GroupRef("g", "t"), mode="ordered", start="earliest")
    ConsumerGroup.objects.update(overrides={"filter": {"value": unknown, "at": 1000, "by": "bob"}})
    (found,) = checks.check_overrides(databases=["default"])
    assert "but subscribers claim nothing because of it: filter=" in found.msg
    ConsumerGroup.objects.update(filter=unknown, overrides={"filter": {"value": {"a": [1]}, "at": 1000, "by": "bob"}})
    assert checks.check_overrides(databases=["default"]) == []
    (found,) = checks.check_registered(databases=["default"])
    assert 'is {"region": ["eu"]} in the code, but {"region": [{"sounds-like": "eu"}]} is registered' in found.msg


def test_before_migrate_there_are_no_overrides(monkeypatch):
    def fail(**options):
        raise ProgrammingError("no such table")

    monkeypatch.setattr(checks.inspection, "list_options", fail)
    monkeypatch.setattr(checks.sessions, "sound", lambda alias: contextlib.nullcontext())
    assert checks.check_overrides(databases=["default"]) == []
