"""A subscriber of the last release runs on the schema of the next: old and new code side by side."""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, migrations, models
from django.db.migrations.loader import MigrationLoader

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import (
    CoalesceKey,
    ConsumerGroup,
    DebouncedMessage,
    DeliveryState,
    OutboxMessage,
    PartitionLease,
    QueueMessage,
    SubscriberHeartbeat,
)
from django_mysqlqueue.service import debouncing, groups, sequencing
from django_mysqlqueue.service.refs import GroupRef
from tests.conftest import QUEUE_MODELS
from tests.support import accounts
from tests.support.harness import USING, Sub, handler
from tests.support.migration_rules import contractions
from tests.support.paths import ROOT
from tests.support.processes import Worker, environment, wait_for

RELEASES = ROOT / "tests" / "releases"
APP = "django_mysqlqueue"


def version_of(package):
    return tuple(int(part) for part in re.findall(r"\d+", package.stem))


OLD = max(RELEASES.glob("django_mysqlqueue-*.zip"), key=version_of)
EVERY_GROUP = [argument for group in accounts.GROUPS for argument in ("--group", group)]
# Not by the finder of an editable install: where the old code lacks a module it would find the working tree's.
SAY_WHERE = (
    "import sys; sys.meta_path[:] = [one for one in sys.meta_path if '__editable__' not in str(one)]; "
    "import django_mysqlqueue; print('code', django_mysqlqueue.__file__, flush=True); "
    "from django.core.management import execute_from_command_line as run; run(['manage.py', *sys.argv[1:]])"
)


def project(code):
    """The environment of a process that runs this code: the path of a package, or of the working tree."""
    env = environment()
    if code == OLD:  # what it covers is not the working tree
        env = {name: value for name, value in env.items() if not name.startswith("COVERAGE_")}
    path = os.pathsep.join([str(code), str(ROOT)])
    return env | {"PYTHONPATH": path, "DJANGO_SETTINGS_MODULE": "tests.releases.settings"}


class Subscriber(Worker):
    """Old or new code; its first line says which."""

    # -P: nothing comes before PYTHONPATH, not even the folder that it is started in.
    COMMAND = ("-P", "-c", SAY_WHERE, "runsubscriber")

    def __init__(self, tmp_path, code, name):
        claim_size = "--batch-size" if code == OLD else "--claim-size"  # renamed after 0.1
        super().__init__(tmp_path, *EVERY_GROUP, "--name", name, claim_size, "20", whole_env=project(code))
        self.name = name
        self.code = code

    def has_leases(self):
        return PartitionLease.objects.filter(leased_by__startswith=f"{self.name}:").exists()


@pytest.fixture
def scene(db, tmp_path):
    """Starts subscribers and publishers, and ends what is left of them."""

    class Scene:
        stop = tmp_path / "stop"
        publishers = []
        subscribers = []

        def subscriber(self, code, name):
            one = Subscriber(tmp_path, code, name)
            self.subscribers.append(one)
            wait_for(one.is_ready, one)
            expected = f"code {code}{os.sep}{APP}{os.sep}__init__.py"
            assert one.output.splitlines()[0] == expected
            return one

        def publisher(self, code, name):
            with (tmp_path / f"publisher-{name}.log").open("wb") as log:
                self.publishers.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", "tests.support.publisher", name, str(self.stop)],
                        env=project(code),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

        def goes_on(self, worker, more=30):
            """Publishing and handling both do."""
            for name in ("committed", "plain", "atomic", "shared"):
                before = accounts.count(name)
                wait_for(lambda name=name, before=before: accounts.count(name) >= before + more, worker)

        def finish(self, *workers):
            self.stop.touch()
            assert [one.wait(30) for one in self.publishers] == [0] * len(self.publishers)
            wait_for(accounts.is_drained, workers[0], timeout=60)
            self.leave(*workers)
            accounts.assert_balanced()

        def leave(self, *workers):
            for worker in workers:
                worker.send(signal.SIGTERM)
            assert [worker.wait() for worker in workers] == [0] * len(workers), workers[0].output

    scene = Scene()
    scene.publishers, scene.subscribers = [], []
    yield scene
    for process in [*scene.publishers, *(one.process for one in scene.subscribers)]:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def expand(db):
    """A schema of some later version: every table has one more column and index, and there is one more table."""
    tables = [model._meta.db_table for model in QUEUE_MODELS]
    undo = []

    def expand():
        with connection.cursor() as cursor:
            for table in tables:
                cursor.execute(f"ALTER TABLE {table} ADD COLUMN later BIGINT DEFAULT 7 NOT NULL")
                undo.append(f"ALTER TABLE {table} DROP COLUMN later")
                cursor.execute(f"CREATE INDEX later_{table} ON {table} (later)")
                undo.append(f"DROP INDEX later_{table}" + (f" ON {table}" if connection.vendor == "mysql" else ""))
            cursor.execute("CREATE TABLE queue_later (id BIGINT PRIMARY KEY)")
            undo.append("DROP TABLE queue_later")

    yield expand
    with connection.cursor() as cursor:
        for statement in reversed(undo):
            cursor.execute(statement)


# -- old and new side by side -------------------------------------------------


@pytest.mark.promise("Rolling upgrades")
@pytest.mark.processes
@pytest.mark.slow
def test_a_rolling_upgrade_under_load(expand, scene):
    """Old code goes on while the schema grows; new code joins its groups; one of the old is killed, one leaves."""
    old = [scene.subscriber(OLD, f"old{number}") for number in range(2)]
    scene.publisher(OLD, "a")
    scene.publisher(ROOT, "b")
    scene.goes_on(old[0])
    expand()
    scene.goes_on(old[0])
    new = [scene.subscriber(ROOT, f"new{number}") for number in range(2)]
    for worker in (*old, *new):
        wait_for(worker.has_leases, worker)
    scene.goes_on(new[0])
    old[0].send(signal.SIGKILL)
    old[0].wait()
    scene.goes_on(new[0])
    scene.leave(old[1])
    scene.goes_on(new[0])
    scene.finish(*new)
    for worker in (old[1], *new):
        assert "died" not in worker.output
        assert "group.failed" not in worker.output


@pytest.mark.promise("Rolling upgrades")
@pytest.mark.processes
@pytest.mark.slow
def test_a_step_back(scene):
    """New code is replaced by old code again: what it left behind is read, and nothing is lost."""
    new = scene.subscriber(ROOT, "new")
    scene.publisher(ROOT, "a")
    scene.goes_on(new)
    new.send(signal.SIGKILL)
    new.wait()
    assert DeliveryState.objects.exists() or OutboxMessage.objects.exists() or PartitionLease.objects.exists()
    old = scene.subscriber(OLD, "old")
    scene.goes_on(old)
    scene.finish(old)


@pytest.mark.promise("Rolling upgrades")
@pytest.mark.processes
@pytest.mark.slow
def test_the_last_releases_schema_migrates_with_what_is_in_it(scene):
    """Old code on its own schema, killed; then ``migrate``; then new code."""
    last = last_migration_of(OLD)
    call_command("migrate", APP, last, verbosity=0)
    try:
        old = scene.subscriber(OLD, "old")
        scene.publisher(OLD, "a")
        scene.goes_on(old)
        old.send(signal.SIGKILL)
        old.wait()
        left = SubscriberHeartbeat.objects.values_list("info", flat=True)
        versions = {info["version"] if isinstance(info, dict) else json.loads(info)["version"] for info in left}
        assert versions == {".".join(map(str, version_of(OLD)))}
    finally:
        call_command("migrate", APP, verbosity=0)
    new = scene.subscriber(ROOT, "new")
    scene.goes_on(new)
    scene.finish(new)


# -- priorities ---------------------------------------------------------------

PRIORITIES = (0, -5, 10, 100, -100, 0)


def publish_with_priorities(settings):
    """To topics with and without hashed keys. Return (topic, id) → (priority, metadata, partition) of what waits."""
    settings.MYSQLQUEUE = {"TOPICS": {"p.shared": {"PARTITIONS": 3}}}
    for topic in ("p.plain", "p.shared"):
        for n, priority in enumerate(PRIORITIES):
            publish(topic, {"n": n}, key=f"k{n % 2}", priority=priority, metadata={"priority": priority})
    return {
        (row.topic, row.message_id): (row.metadata["priority"], row.metadata, row.partition_key)
        for row in OutboxMessage.objects.all()
    }


def in_the_log():
    return {
        (row.topic, row.message_id): (row.metadata["priority"], row.metadata, row.partition_key)
        for row in QueueMessage.objects.all()
    }


def sequence_with(code):
    """Run ``queuesequence`` of this code."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", SAY_WHERE, "queuesequence"],
        env=project(code),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith(f"code {code}{os.sep}")


@pytest.mark.promise("Rolling upgrades")
@pytest.mark.processes
@pytest.mark.slow
def test_the_last_release_sequences_priorities_as_they_are(db, settings):
    """Those above 0 are scheduled messages to it, which came due long ago."""
    wanted = publish_with_priorities(settings)
    sequence_with(OLD)
    assert in_the_log() == wanted
    assert not OutboxMessage.objects.exists()


@pytest.mark.promise("Rolling upgrades")
@pytest.mark.processes
@pytest.mark.slow
def test_a_subscriber_of_the_last_release_handles_priorities(scene, settings):
    """It has the publishers' keys. Then this release handles what the old one sequenced, with keys and priorities."""
    publish_with_priorities(settings)
    sequencing.sequence(USING)
    old = scene.subscriber(OLD, "old")
    wait_for(accounts.is_drained, old)
    expected = sorted((f"k{n % 2}", n) for n in range(len(PRIORITIES)))
    for group in accounts.GROUPS:
        assert sorted(accounts.effects(group)) == expected, group
    scene.leave(old)
    assert "group.failed" not in old.output
    assert not QueueMessage.objects.filter(topic__endswith="_dlq").exists()

    # The old one sequences, and handles nothing any more.
    publish_with_priorities(settings)
    sequence_with(OLD)
    got = []

    def note(one):
        got.append((one.group, one.payload["n"], one.key, one.priority))

    handlers = [
        handler(topic="p.plain", group="plain", function=note),
        handler(topic="p.shared", group="shared", mode="shared", function=note),
    ]
    Sub(*handlers, priority_share=0).settle()
    for group in ("plain", "shared"):
        of_group = [one[1:] for one in got if one[0] == group]
        assert sorted(of_group) == [(n, f"k{n % 2}", priority) for n, priority in enumerate(PRIORITIES)]
        priorities = [priority for *_, priority in of_group]
        assert priorities == sorted(priorities, reverse=True)


@pytest.mark.promise("Rolling upgrades")
@pytest.mark.processes
@pytest.mark.slow
def test_priorities_during_a_rolling_upgrade(scene, settings):
    """Old and new subscribers side by side: every message is handled by one or the other."""
    old = scene.subscriber(OLD, "old")
    new = scene.subscriber(ROOT, "new")
    for _ in range(10):
        publish_with_priorities(settings)
    wait_for(accounts.is_drained, new, timeout=60)
    expected = {(f"k{n % 2}", n) for n in range(len(PRIORITIES))}
    for group in accounts.GROUPS:
        found = Counter(accounts.effects(group))
        assert set(found) == expected, group
        assert min(found.values()) >= 10, group
    scene.leave(old, new)
    assert "group.failed" not in old.output + new.output


# -- limits and expiry ---------------------------------------------------------


@pytest.mark.promise("Rolling upgrades")
@pytest.mark.processes
@pytest.mark.slow
def test_limits_during_a_rolling_upgrade(scene):
    """The old subscriber takes no slots, and neither loses messages nor disturbs the accounts of the new one."""
    old = scene.subscriber(OLD, "old")
    new = scene.subscriber(ROOT, "new")
    wait_for(lambda: ConsumerGroup.objects.filter(topic__startswith="p.").count() >= len(accounts.GROUPS), new)
    ConsumerGroup.objects.update(limits={"rate": "50/s", "max_in_flight_per_key": 1})
    for topic in ("p.plain", "p.shared"):
        publish_many(topic, [Message({"n": n}, key=f"k{n % 3}") for n in range(60)])
    wait_for(accounts.is_drained, new, timeout=60)
    for group in accounts.GROUPS:
        assert set(accounts.effects(group)) == {(f"k{n % 3}", n) for n in range(60)}, group
    scene.leave(old, new)
    assert "group.failed" not in old.output + new.output


@pytest.mark.promise("Rolling upgrades")
@pytest.mark.processes
@pytest.mark.slow
def test_the_last_release_sequences_messages_with_an_expiry(db):
    """It carries along what the publisher asked for."""
    past = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    publish("p.plain", "expired", key="k", expires_at=past)
    publish("p.plain", "expired, too", key="k", expires_in=0.001)
    publish("p.plain", "live", key="k", expires_in=3600)
    sequence_with(OLD)
    assert not OutboxMessage.objects.exists()
    got = []
    Sub(handler(topic="p.plain", function=lambda one: got.append((one.payload, one.expires_at is None)))).settle()
    assert got == [("live", False)]


@pytest.mark.promise("Rolling upgrades")
@pytest.mark.processes
@pytest.mark.slow
def test_the_last_release_sequences_messages_with_a_coalesce_key(db):
    """The next pass of this release notes their keys, although it finds nothing to move."""
    publish_many("p.plain", [Message(n, coalesce="c") for n in range(5)])
    sequence_with(OLD)
    assert not OutboxMessage.objects.exists()
    assert not CoalesceKey.objects.exists()
    sequencing.sequence(connection.alias)
    assert CoalesceKey.objects.get().message_offset == QueueMessage.objects.latest("offset").offset
    got = []
    Sub(handler(topic="p.plain", function=lambda one: got.append(one.payload))).settle()
    assert got == [4]


@pytest.mark.promise("Rolling upgrades")
@pytest.mark.processes
@pytest.mark.slow
def test_the_last_release_sequences_debounced_messages(db):
    """It keeps their delays, and drops none. What it leaves behind replaces nothing, and GC deletes it."""
    for n in range(3):
        publish("p.plain", n, key="k", coalesce="c", delay=600)
    early, _, late = OutboxMessage.objects.order_by("outbox_id")
    OutboxMessage.objects.filter(outbox_id=early.outbox_id).update(deliver_at=1)
    sequence_with(OLD)
    assert [bytes(one.payload) for one in QueueMessage.objects.all()] == [b"0"]
    assert DebouncedMessage.objects.count() == 3
    OutboxMessage.objects.filter(outbox_id=late.outbox_id).update(deliver_at=1)
    sequence_with(OLD)
    OutboxMessage.objects.update(deliver_at=1)
    sequencing.sequence(connection.alias)
    assert sorted(bytes(one.payload) for one in QueueMessage.objects.all()) == [b"0", b"1", b"2"]
    debouncing.collect(connection.alias)
    assert not DebouncedMessage.objects.exists()


def last_migration_of(package):
    with zipfile.ZipFile(package) as archive:
        return max(Path(name).stem for name in archive.namelist() if re.search(r"/migrations/\d{4}_\w+\.py$", name))


def test_the_migrations_of_the_last_release_are_unchanged():
    """They have been applied somewhere: what is in them cannot be taken back."""
    with zipfile.ZipFile(OLD) as archive:
        released = [name for name in archive.namelist() if re.search(r"/migrations/\d{4}_\w+\.py$", name)]
        assert released
        for name in released:
            assert (ROOT / name).read_text() == archive.read(name).decode(), name


# -- new code on an old schema ------------------------------------------------


@pytest.mark.promise("Rolling upgrades")
@pytest.mark.parametrize(
    "command",
    [("runsubscriber", "--drain"), ("queuestatus",), ("queuesequence",), ("queuegc",), ("queuedropgroup", "g", "t")],
    ids=lambda command: command[0],
)
def test_new_code_refuses_an_old_schema(db, settings, command):
    settings.MIGRATION_MODULES = {APP: "tests.releases.future"}
    groups.register("default", GroupRef("g", "t"), mode="ordered", start="earliest")
    with pytest.raises(CommandError, match=r"Missing migrations: 9999_later\. Run manage\.py migrate\."):
        call_command(*command, stdout=io.StringIO())
    settings.MIGRATION_MODULES = {}
    call_command("queuestatus", stdout=io.StringIO())


def test_old_code_accepts_a_new_schema(db, settings):
    """A migration that this code does not know has been applied."""
    settings.MIGRATION_MODULES = {APP: "tests.releases.future"}
    call_command("migrate", APP, verbosity=0)
    try:
        settings.MIGRATION_MODULES = {}
        call_command("queuestatus", stdout=io.StringIO())
        publish("t", 1)
    finally:
        settings.MIGRATION_MODULES = {APP: "tests.releases.future"}
        call_command("migrate", APP, last_here(), verbosity=0)


def test_a_schema_without_migrations_is_accepted(db, settings):
    """Projects that switch migrations off for their tests make the tables from the models."""
    settings.MIGRATION_MODULES = {APP: None}
    call_command("queuestatus", stdout=io.StringIO())


def last_here():
    return max(path.stem for path in (ROOT / APP / "migrations").glob("[0-9]*.py"))


def before():
    """The models' state after the first migration."""
    return MigrationLoader(None).project_state((APP, "0001_initial"))


# -- expand, then contract ----------------------------------------------------


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
    assert contractions(migration(operation, contract_of="0.1"), before()) == []
    assert contractions(migration(operation, contract_of=""), before()) != []


def test_a_release_is_kept():
    """Its digest is the one that the folder's README names."""
    digest = hashlib.sha256(OLD.read_bytes()).hexdigest()
    assert re.search(rf"`{re.escape(OLD.name)}`.*`{digest}`", (RELEASES / "README.md").read_text())
