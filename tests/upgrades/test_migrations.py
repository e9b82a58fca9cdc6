"""What a migration of a release may do, and which schemas the code accepts."""

from __future__ import annotations

import io

import pytest
from django.core.management import CommandError, call_command
from django.db import migrations, models
from django.db.migrations.loader import MigrationLoader

from django_mysqlqueue import publish
from django_mysqlqueue.service import groups
from django_mysqlqueue.service.refs import GroupRef
from tests.support.paths import ROOT
from tests.upgrades import releases
from tests.upgrades.migration_rules import contractions

APP = "django_mysqlqueue"
FOLDER = ROOT / APP / "migrations"
LATER = "tests.upgrades.migrations"


# -- new code on an old schema ------------------------------------------------


@pytest.mark.promise("Rolling upgrades")
@pytest.mark.parametrize(
    "command",
    [("runsubscriber", "--drain"), ("queuestatus",), ("queuesequence",), ("queuegc",), ("queuedropgroup", "g", "t")],
    ids=lambda command: command[0],
)
def test_new_code_refuses_an_old_schema(db, settings, command):
    settings.MIGRATION_MODULES = {APP: LATER}
    groups.register("default", GroupRef("g", "t"), mode="ordered", start="earliest")
    with pytest.raises(CommandError, match=r"Missing migrations: 9999_later\. Run manage\.py migrate\."):
        call_command(*command, stdout=io.StringIO())
    settings.MIGRATION_MODULES = {}
    call_command("queuestatus", stdout=io.StringIO())


def test_old_code_accepts_a_new_schema(db, settings):
    """A migration that this code does not know has been applied."""
    settings.MIGRATION_MODULES = {APP: LATER}
    call_command("migrate", APP, verbosity=0)
    try:
        settings.MIGRATION_MODULES = {}
        call_command("queuestatus", stdout=io.StringIO())
        publish("t", 1)
    finally:
        settings.MIGRATION_MODULES = {APP: LATER}
        call_command("migrate", APP, last_here(), verbosity=0)


def test_a_schema_without_migrations_is_accepted(db, settings):
    """Projects that switch migrations off for their tests make the tables from the models."""
    settings.MIGRATION_MODULES = {APP: None}
    call_command("queuestatus", stdout=io.StringIO())


def last_here():
    return max(path.stem for path in FOLDER.glob("[0-9]*.py"))


def before():
    """The models' state after the first migration."""
    return MigrationLoader(None).project_state((APP, "0001_initial"))


# -- expand, then contract ----------------------------------------------------


@pytest.mark.any_engine
@pytest.mark.promise("Rolling upgrades")
def test_the_migrations_of_the_last_release_are_unchanged():
    """They have been applied somewhere. Before 1.0, there are none."""
    released = releases.last_release()
    listed = releases.git("ls-tree", "--name-only", released, f"{APP}/migrations/").decode().split() if released else []
    for path in listed:
        assert (ROOT / path).read_bytes() == releases.git("show", f"{released}:{path}"), path


@pytest.mark.promise("Rolling upgrades")
def test_every_migration_only_expands():
    loader = MigrationLoader(None)
    state = before()
    own = sorted(name for app, name in loader.disk_migrations if app == APP)
    assert own[0] == "0001_initial"
    for name in own[1:]:
        assert contractions(loader.disk_migrations[APP, name], state) == [], name


def migration(*operations, **attributes):
    return type("Migration", (migrations.Migration,), {"operations": list(operations), **attributes})(
        "0002_sample", APP
    )


def nothing(apps, schema_editor):
    pass


NEW_TABLE = migrations.CreateModel("Later", [("id", models.BigAutoField(primary_key=True))])
GOOD = [
    NEW_TABLE,
    migrations.AddField("sequencer", "later", models.BigIntegerField(db_default=0)),
    migrations.AddField("sequencer", "later", models.BigIntegerField(null=True)),
    migrations.AddField("sequencer", "later", models.BigIntegerField(null=True, unique=True)),
    migrations.AddIndex("sequencer", models.Index(fields=["last_offset"], name="later")),
    migrations.RunPython(nothing, migrations.RunPython.noop),
    migrations.AlterModelOptions("sequencer", {"verbose_name": "other words"}),
    migrations.AlterField("sequencer", "last_offset", models.BigIntegerField(db_default=0, verbose_name="other words")),
    migrations.SeparateDatabaseAndState(database_operations=[NEW_TABLE]),
]
BAD = [
    migrations.DeleteModel("Sequencer"),
    migrations.RemoveField("sequencer", "last_offset"),
    migrations.RenameField("sequencer", "last_offset", "later"),
    migrations.RenameModel("Sequencer", "Later"),
    migrations.AlterModelTable("sequencer", "later"),
    migrations.AlterField("consumergroup", "topic", models.CharField(max_length=10)),
    migrations.AlterField("sequencer", "last_offset", models.BigIntegerField(null=True)),
    migrations.AddField("sequencer", "later", models.BigIntegerField()),
    migrations.AddField("sequencer", "later", models.BigIntegerField(default=0)),
    migrations.AddField("sequencer", "later", models.BigIntegerField(db_default=0, unique=True)),
    migrations.AddConstraint("consumergroup", models.UniqueConstraint(fields=["topic"], name="later")),
    migrations.AlterUniqueTogether("consumergroup", {("topic", "mode")}),
    migrations.RemoveIndex("outboxmessage", "queue_outbox_due"),
    migrations.RemoveConstraint("consumergroup", "queue_consumer_groups_name"),
    migrations.RunPython(nothing),
    migrations.RunSQL("DROP TABLE queue_sequencer", "CREATE TABLE queue_sequencer (id INT)"),
    migrations.SeparateDatabaseAndState(database_operations=[migrations.RemoveField("sequencer", "last_offset")]),
]


@pytest.mark.parametrize("operation", GOOD, ids=lambda operation: operation.describe())
def test_what_expands_is_admitted(operation):
    assert contractions(migration(operation), before()) == []


@pytest.mark.parametrize(("field", "problems"), [({"null": True}, 0), ({"db_default": 0}, 1)])
def test_a_constraint_on_a_new_column(field, problems):
    """Older code leaves it NULL, and NULLs break no unique constraint."""
    added = migrations.AddField("sequencer", "later", models.BigIntegerField(**field))
    constraint = migrations.AddConstraint("sequencer", models.UniqueConstraint(fields=["later"], name="later"))
    assert len(contractions(migration(added, constraint), before())) == problems


@pytest.mark.parametrize("operation", BAD, ids=lambda operation: operation.describe())
def test_what_contracts_is_not_admitted(operation):
    (problem,) = contractions(migration(NEW_TABLE, operation), before())
    (culprit,) = getattr(operation, "database_operations", [operation])
    assert problem.startswith(f"{culprit.describe()}: ")


@pytest.mark.parametrize("operation", BAD, ids=lambda operation: operation.describe())
def test_a_migration_may_declare_what_it_contracts(operation):
    assert contractions(migration(operation, contract_of="1.0"), before()) == []
    assert contractions(migration(operation, contract_of=""), before()) != []
