"""Projects with several databases: the queue on an alias of its own, routers, replicas."""

from __future__ import annotations

import io
import json
import signal
from collections import Counter

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, connections, router, transaction
from django.test import Client
from django.urls import path

from django_mysqlqueue import Message, TransactionMismatch, checks, publish, publish_many, subscriber
from django_mysqlqueue.admin.pages import PAGES
from django_mysqlqueue.admin.pages.overview import OverviewPage
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.management.base import require_tables
from django_mysqlqueue.management.commands.queuestatus import read_status
from django_mysqlqueue.models import ConsumerGroup, Operation, OutboxMessage, PartitionLease, QueueMessage
from django_mysqlqueue.operations import pausing
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.service import groups, sequencing
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session
from tests.app.models import Effect
from tests.conftest import QUEUE_MODELS
from tests.support import oracle
from tests.support.harness import Sub, handler, in_thread, sequence
from tests.support.routers import QueueElsewhere, QueueKeptOut, ReadsFromReplica
from tests.test_processes import Worker, assert_ordered, effects, wait_for

urlpatterns = [path("admin/", admin.site.urls)]
QUEUE = "queue"
REF = GroupRef("plain", "p.plain")


@pytest.fixture
def queue(queue_db):
    """An empty queue on the alias ``queue``; what is on ``default`` must stay empty."""
    yield
    assert not connections[QUEUE].in_atomic_block
    for model in QUEUE_MODELS:
        assert not model.objects.using("default").exists(), f"{model.__name__} on default"


@pytest.fixture(params=["setting", "router", "using"])
def where(request, queue, settings):
    """The three ways to say where the queue is; gives what a call must pass on."""
    if request.param == "setting":
        settings.MYSQLQUEUE = {"DATABASE": QUEUE}
    elif request.param == "router":
        settings.DATABASE_ROUTERS = [QueueElsewhere()]
    return {"using": QUEUE} if request.param == "using" else {}


def command(*arguments, **options):
    out = io.StringIO()
    call_command(*arguments, stdout=out, no_color=True, **options)
    return out.getvalue()


def on_queue(model=OutboxMessage):
    return model.objects.using(QUEUE).count()


# -- publishing ---------------------------------------------------------------


def test_publishing_goes_where_the_queue_is(where):
    publish("t", 1, **where)
    assert publish_many("t", [2, 3], **where) == 2
    assert on_queue() == 3


def test_using_wins_over_the_setting(queue, settings):
    settings.MYSQLQUEUE = {"DATABASE": "default"}
    settings.DATABASE_ROUTERS = [ReadsFromReplica()]
    publish("t", 1, using=QUEUE)
    assert on_queue() == 1


def test_a_message_commits_with_the_queues_transaction_only(where):
    with transaction.atomic(using=QUEUE):
        publish("t", 1, **where)
        transaction.set_rollback(True, using=QUEUE)
    assert on_queue() == 0
    with transaction.atomic(using="default"):
        Effect.objects.create(name="mine")
        with pytest.raises(TransactionMismatch, match="'queue', which has no open transaction, but 'default' has one"):
            publish("t", 2, **where)
        publish("t", 3, on_mismatch="on_commit", **where)
        assert on_queue() == 0
        publish("t", 4, on_mismatch="commit_now", **where)
        assert in_thread(on_queue) == 1
        with transaction.atomic(using=QUEUE):
            publish("t", 5, **where)
    assert {bytes(row.payload) for row in OutboxMessage.objects.using(QUEUE)} == {b"3", b"4", b"5"}


# -- commands -----------------------------------------------------------------


@pytest.fixture(params=["setting", "router", "--database", "--database against a router"])
def named(request, queue, settings):
    """What a command line must say so that it works on the alias ``queue``."""
    if request.param == "setting":
        settings.MYSQLQUEUE = {"DATABASE": QUEUE}
    elif request.param == "router":
        settings.DATABASE_ROUTERS = [QueueElsewhere()]
    elif request.param == "--database against a router":
        settings.DATABASE_ROUTERS = [SendsTheQueueElsewhere()]
    return ("--database", QUEUE) if request.param.startswith("--database") else ()


class SendsTheQueueElsewhere:
    def db_for_read(self, model, **hints):
        return "other"

    db_for_write = db_for_read


OPERATIONS = [
    ("queuepause g t --noinput", "is paused."),
    ("queueresume g t --noinput", "is resumed."),
    ("queueseek g t latest --noinput", "is the first from offset"),
    ("queueretry g t --dry-run", "No message waits"),
    ("queueredrive t --dry-run", "No dead letter"),
    ("queuediscard t --reason x --dry-run", "No dead letter"),
    ("queuescheduled t later --at 2100-01-01T00:00 --noinput", "messages moved to 2100-01-01"),
    ("queuecancel t later --noinput", "Scheduled messages cancelled: 1."),
    ("queuescheduled", "Nothing is scheduled"),
    ("queuerelease g t k --dry-run", "leases will be released: 1."),
]
"""A command line, and what it says."""


def test_every_command_works_where_the_queue_is(named):
    publish("t", 1, using=QUEUE)
    publish("t", 2, id="later", delay=1000, using=QUEUE)
    groups.register(QUEUE, GroupRef("g", "t"), mode="ordered", start="earliest")
    assert "Moved 1 messages." in command("queuesequence", *named)
    status = json.loads(command("queuestatus", "--format", "json", *named))
    assert (status["database"], status["groups"][0]["lag"]) == (QUEUE, 1)
    assert "Healthy: 1 group, lag 1, 0 in the outbox." in command("queuehealth", *named)
    assert "Would delete 0 messages." in command("queuegc", "--dry-run", *named)
    assert "Deleted 0 messages" in command("queuegc", *named)
    assert "is now shared" in command("queuegroupmode", "g", "t", "shared", "--noinput", *named)
    assert groups.find(QUEUE, GroupRef("g", "t")).mode == "shared"
    PartitionLease.objects.using(QUEUE).create(consumer_group="g", topic="t", partition_key="k", leased_by="s:1")
    for line, said in OPERATIONS:
        assert said in command(*line.split(), *named), line
    assert on_queue(Operation) == len([line for line, _ in OPERATIONS if "--noinput" in line]) + 1
    assert "is dropped." in command("queuedropgroup", "g", "t", "--noinput", *named)
    assert on_queue(ConsumerGroup) == 0
    assert on_queue(QueueMessage) == 1


def test_no_command_is_left_out():
    """A new one has to be in the test above, or say here why it need not be."""
    from django.core.management import get_commands

    mine = {name for name, app in get_commands().items() if app == "django_mysqlqueue"}
    here = {"queuesequence", "queuestatus", "queuehealth", "queuegc", "queuegroupmode", "queuedropgroup"}
    here.add("queuedeadletter")
    # tests/pipeline: they read and write by connections of their own, made from the alias.
    spark = {"queuearchive", "queuereplay", "queuereport"}
    assert mine == here | {"runsubscriber"} | spark | {line.split()[0] for line, _ in OPERATIONS}


# -- migrate ------------------------------------------------------------------


def test_groups_are_registered_only_where_the_queue_is(queue, settings):
    settings.MYSQLQUEUE = {"DATABASE": QUEUE}
    command("migrate", verbosity=0)
    assert not ConsumerGroup.objects.using("default").exists()
    assert on_queue(ConsumerGroup) == 0
    command("migrate", database=QUEUE, verbosity=0)
    assert {"plain", "atomic", "shared"} <= set(
        ConsumerGroup.objects.using(QUEUE).values_list("consumer_group", flat=True)
    )


def tables(using):
    return {name for name in connections[using].introspection.table_names() if name.startswith("queue_")}


@pytest.fixture
def unmigrated(queue):
    """``queue`` and ``default`` without the queue's tables; put back afterwards."""
    for using in (QUEUE, "default"):
        call_command("migrate", "django_mysqlqueue", "zero", database=using, verbosity=0)
        assert tables(using) == set()
    yield
    # What a router kept out has been recorded as applied.
    for using in (QUEUE, "default"):
        with connections[using].cursor() as cursor:
            if not tables(using):
                cursor.execute("DELETE FROM django_migrations WHERE app = 'django_mysqlqueue'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "routers", [])
        for using in (QUEUE, "default"):
            call_command("migrate", "django_mysqlqueue", database=using, verbosity=0)
    for model in QUEUE_MODELS:
        model.objects.using("default").all().delete()


def test_a_router_that_keeps_the_tables_together(unmigrated, settings):
    """``migrate`` on every alias makes them on one, and says so where a command looks elsewhere."""
    settings.DATABASE_ROUTERS = [QueueElsewhere()]
    for using in ("default", QUEUE):
        call_command("migrate", "django_mysqlqueue", database=using, verbosity=0)
    assert tables("default") == set()
    assert len(tables(QUEUE)) == len(QUEUE_MODELS)
    assert checks.check_router() == checks.check_migrating() == []
    assert on_queue(ConsumerGroup) > 0
    command("queuestatus")
    with pytest.raises(CommandError, match=r"not in the database 'default'.*routers keep them out"):
        command("queuestatus", "--database", "default")


def test_tables_that_a_router_keeps_out_everywhere(unmigrated, settings):
    """``migrate`` goes through, registers nothing, and the check says what is wrong."""
    settings.DATABASE_ROUTERS = [QueueKeptOut()]
    call_command("migrate", "django_mysqlqueue", verbosity=0)
    (warning,) = checks.check_migrating()
    assert warning.id == "django_mysqlqueue.W014"
    assert "queue_outbox" in warning.msg
    with pytest.raises(CommandError, match="routers keep them out"):
        command("runsubscriber", "--drain")


def test_the_setting_against_the_router(settings):
    """The setting names an alias that the router keeps the tables out of."""
    settings.DATABASE_ROUTERS = [QueueElsewhere()]
    assert checks.check_migrating() == []
    settings.MYSQLQUEUE = {"DATABASE": "default"}
    (warning,) = checks.check_migrating()
    assert "'default'" in warning.msg


def test_tables_that_are_missing_on_the_alias(unmigrated):
    with pytest.raises(CommandError, match=r"run manage\.py migrate --database queue"):
        command("queuestatus", "--database", QUEUE)


# -- atomic handlers ----------------------------------------------------------


def test_atomic_handlers_beside_a_queue_of_its_own_are_warned_of(settings, no_handlers):
    subscriber("t", group="g")(lambda delivery: None)
    settings.MYSQLQUEUE = {"DATABASE": QUEUE}
    assert checks.check_atomic_handlers() == []
    subscriber("t", group="h", atomic=True)(lambda delivery: None)
    (warning,) = checks.check_atomic_handlers()
    assert warning.id == "django_mysqlqueue.W015"
    assert "'queue'" in warning.msg
    assert "at least once" in warning.hint


def test_atomic_handlers_beside_the_projects_tables_are_not(settings, no_handlers):
    subscriber("t", group="h", atomic=True)(lambda delivery: None)
    assert checks.check_atomic_handlers() == []
    settings.MYSQLQUEUE = {"DATABASE": QUEUE}
    settings.DATABASE_ROUTERS = [SomethingOnQueue()]
    assert checks.check_atomic_handlers() == []


def test_the_queues_own_models_are_not_the_projects(settings, no_handlers):
    """The dashboard's model has no table: with a router it is on the queue's alias too."""
    subscriber("t", group="h", atomic=True)(lambda delivery: None)
    settings.DATABASE_ROUTERS = [QueueElsewhere()]
    (warning,) = checks.check_atomic_handlers()
    assert warning.id == "django_mysqlqueue.W015"


class SomethingOnQueue:
    def db_for_write(self, model, **hints):
        return QUEUE if model is Effect else None


def test_publishing_inside_a_handler_with_a_transaction_elsewhere(queue_db):
    """A failed attempt; in an atomic handler the queue's transaction is open, and the message commits with it."""
    publish("t", 1)

    def elsewhere(delivery):
        with transaction.atomic(using=QUEUE):
            publish("u", 1)

    Sub(handler(function=elsewhere, group="plain", max_attempts=1)).settle()
    sequence()
    (dead,) = QueueMessage.objects.filter(topic="t_dlq")
    assert "TransactionMismatch" in dead.last_error
    assert not QueueMessage.objects.filter(topic="u").exists()
    Sub(handler(function=elsewhere, group="atomic", atomic=True)).settle()
    sequence()
    assert QueueMessage.objects.filter(topic="u").count() == 1


def test_what_an_atomic_handler_writes_elsewhere_stays(queue_db):
    """Exactly once ends at the queue's database: a rollback there does not reach the other."""
    publish("t", 1)

    def write(delivery):
        Effect.objects.create(name="beside the queue")
        Effect.objects.using(QUEUE).create(name="elsewhere")
        if delivery.attempt == 1:
            raise ValueError("no")

    Sub(handler(function=write, atomic=True)).settle()
    assert Effect.objects.filter(name="beside the queue").count() == 1
    assert Effect.objects.using(QUEUE).filter(name="elsewhere").count() == 2


def test_what_a_handler_leaves_open_on_another_alias_is_rolled_back(queue):
    def check():
        sessions.adopt(QUEUE, sessions.Timeouts(idle=60, lock_wait=5, network=5, read=60))
        for leave_open in (lambda: transaction.atomic().__enter__(), lambda: connection.set_autocommit(False)):
            connections[QUEUE].ensure_connection()
            sound = connections[QUEUE].connection
            leave_open()
            Effect.objects.create(name="left open")
            sessions.tidy()
            assert not connection.in_atomic_block
            assert connection.connection is None
            assert connections[QUEUE].connection is sound
            assert connection.get_autocommit()
            assert not Effect.objects.filter(name="left open").exists()

    in_thread(check)


def test_an_error_on_another_alias_renews_its_connection_alone(queue):
    def check():
        connections[QUEUE].ensure_connection()
        sound = connections[QUEUE].connection
        with pytest.raises(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT nothing FROM nowhere")
        sessions.tidy()
        assert connection.connection is None
        assert connections[QUEUE].connection is sound

    in_thread(check)


# -- replicas -----------------------------------------------------------------


@pytest.fixture
def replica(db, settings):
    """A router that sends every read to a replica, which fails whoever asks it."""
    settings.DATABASE_ROUTERS = [ReadsFromReplica()]
    with pytest.raises(AssertionError, match="the replica was read"):
        Effect.objects.exists()


def test_the_service_layer_never_reads_a_replica(replica):
    publish("t", 1)
    publish_many("t", [2, 3])
    require_tables("default")
    groups.register("default", GroupRef("g", "t"), mode="ordered", start="latest")
    sequencing.sequence("default")
    assert read_status("default").topics[0].in_log == 3
    for name in ("queuesequence", "queuestatus", "queuegc", "migrate"):
        command(name)
    command("queuegroupmode", "g", "t", "shared", "--noinput")
    command("queuedropgroup", "g", "t", "--noinput")
    with pytest.raises(CommandError, match="There is no group"):
        command("queuedropgroup", "g", "t", "--noinput")


def test_housekeeping_never_reads_a_replica(replica):
    publish_many("t", [Message(number, key=f"k{number}") for number in range(10)])
    sub = Sub(handler(), handler(group="shared", mode="shared"))
    sub.settle()
    for _ in sub.poller.maintenance.round():
        pass
    sub.leave()


def test_the_checks_never_read_a_replica(replica):
    command("check")
    command("check", "--database", "default")


class ReadsTheQueueFromReplica(ReadsFromReplica):
    """Sessions, users and the rest of the admin are not what is looked at here."""

    def db_for_read(self, model, **hints):
        return "replica" if model._meta.app_label == "django_mysqlqueue" else None


@pytest.mark.parametrize("using", ["default", QUEUE])
def test_the_admin_shows_the_queue_and_no_replica(queue_db, settings, using):
    settings.ROOT_URLCONF = __name__
    settings.DATABASE_ROUTERS = [ReadsTheQueueFromReplica()]
    settings.MYSQLQUEUE = {"DATABASE": using}
    publish("shown", 1)
    sequencing.sequence(using)
    publish("shown", 2)
    groups.register(using, GroupRef("g", "shown"), mode="ordered", start="latest")
    User.objects.all().delete()
    client = Client()
    client.force_login(User.objects.create_superuser("admin", password="admin"))  # noqa: S106
    dashboard = "/admin/django_mysqlqueue/dashboard/"
    offset = QueueMessage.objects.using(using).get(topic="shown").offset
    for page in PAGES:
        address = dashboard if page is OverviewPage else f"{dashboard}{page.name}/"
        assert client.get(address, {"group": "g", "topic": "shown", "offset": offset}).status_code == 200
    (row,) = client.get(dashboard).context["rows"]
    assert (row.group.ref, client.get(dashboard).context["overview"].outbox.waiting.value) == (("g", "shown"), 1)
    pausing.pause(using, GroupRef("g", "shown"), actor="admin")
    operations = "/admin/django_mysqlqueue/operation/"
    for query in ("", "?q=shown", "?o=1"):
        (operation,) = client.get(operations + query).context["cl"].result_list
        assert operation.action == "pause"
    assert client.get(f"{operations}{operation.pk}/change/").status_code == 200
    assert client.get(f"{operations}{operation.pk}/history/").status_code == 200


# -- whole processes ----------------------------------------------------------


@pytest.fixture
def start(db, tmp_path):
    workers = []

    def start(*arguments, routers=(), **settings):
        worker = Worker(tmp_path, *arguments, env={"TEST_ROUTERS": json.dumps(routers)}, **settings)
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.end()


EVERY_GROUP = ("--group", "plain", "--group", "atomic", "--group", "shared")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((), {"DATABASE": QUEUE}),
        ((), {"routers": ["tests.support.routers.QueueElsewhere"]}),
        (("--database", QUEUE), {}),
    ],
    ids=["setting", "router", "--database"],
)
def test_a_subscriber_of_a_queue_on_its_own_alias(queue, start, arguments, options):
    """Handlers write to ``default``; nothing of the queue is ever there."""
    publish_many("p.plain", (Message({"n": n}, key=f"k{n % 3}") for n in range(60)), using=QUEUE)
    publish_many("p.shared", (Message({"n": n}) for n in range(20)), using=QUEUE)
    worker = start(*EVERY_GROUP, *arguments, "--drain", **options)
    assert worker.wait() == 0, worker.output
    assert f"database  {QUEUE} (" in worker.output
    for group, count in (("plain", 60), ("atomic", 60), ("shared", 20)):
        assert Counter(number for _, _, number in effects(group)) == Counter(range(count)), group
    assert_ordered(effects("plain"))
    assert oracle.unsettled(Session(QUEUE), REF)[0] == 0
    assert not Effect.objects.using(QUEUE).exists()


@pytest.mark.processes
def test_a_subscriber_never_reads_a_replica(db, start):
    """From its start to its end. The handlers' own reads are theirs to route."""
    publish_many("p.plain", (Message({"n": n}, key=f"k{n % 3}") for n in range(60)))
    publish_many("p.shared", (Message({"n": n}) for n in range(20)))
    publish("p.plain", {"n": 60, "fail": True}, key="k0")
    worker = start(*EVERY_GROUP, routers=["tests.support.routers.ReadsFromReplica"])

    def is_done():
        # The one that failed has run twice in the group that is not atomic.
        return [len(effects(group)) for group in ("plain", "atomic", "shared")] == [62, 61, 20]

    wait_for(is_done, worker)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.output
    assert "replica" not in worker.output
    assert "died" not in worker.output


def test_the_harness_means_what_it_says(settings):
    """These aliases are what the tests above take them for."""
    assert get_settings().database is None
    assert connections[QUEUE].settings_dict["NAME"] != connection.settings_dict["NAME"]
    assert connections[QUEUE].vendor == connection.vendor
    settings.DATABASE_ROUTERS = [QueueElsewhere()]
    assert router.db_for_write(OutboxMessage) == QUEUE
