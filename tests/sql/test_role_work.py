"""Each role does all of its work on a queue with rows in every table: every operation, command and function."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import re
import shlex

import pytest
from asgiref.sync import async_to_sync
from django.core.management import call_command, get_commands
from django.db import connection, connections
from django.db.utils import OperationalError
from django.test import override_settings
from prometheus_client import CollectorRegistry, generate_latest

import django_mysqlqueue
from django_mysqlqueue import (
    Message,
    acancel,
    apublish,
    apublish_many,
    areschedule,
    cancel,
    inspection,
    operations,
    publish,
    publish_many,
    reschedule,
    tails,
    tasks,
)
from django_mysqlqueue.checks import grants
from django_mysqlqueue.checks.grants import READ, ROLES, Grant
from django_mysqlqueue.metrics.queue import QueueCollector
from django_mysqlqueue.models import (
    ConsumerGroup,
    DeliveryState,
    JobResult,
    Operation,
    OutboxMessage,
    PartitionLease,
    QueueMessage,
    Slots,
    SubscriberHeartbeat,
)
from django_mysqlqueue.names.rules import relayed_topic
from django_mysqlqueue.operations import steps
from django_mysqlqueue.tasks import (
    acancel_job,
    async_wait,
    call,
    cancel_job,
    enqueue_chain,
    enqueue_many,
    progress_of,
    wait,
)
from tests.app import jobs
from tests.conftest import empty
from tests.support import full_queue, job_worlds, schedule_worlds
from tests.support.full_queue import JOBS, ORDERED, REFS, SHARED
from tests.support.harness import USING, Sub, sequence
from tests.support.internals import CLIENT_PROCEDURES, GroupRef, groups, installing, relaying, schedules, sequencing
from tests.support.roles import DENIED, PASSWORD, account, user_of
from tests.support.snapshots import Snapshot
from tests.support.sql_clients import Client

pytestmark = [pytest.mark.servers_only, pytest.mark.promise("Roles")]

OTHER = "queue"
LATER = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
MOVED = {"TOPICS": {"t": {"DATABASE": OTHER, "VIA": USING}}}
DLQS = ("t_dlq", "jobs.default_dlq")


@pytest.fixture(scope="module")
def full(_database):
    """The rows of the full queue."""
    empty()
    empty(OTHER)
    full_queue.fill()
    yield Snapshot()
    empty()


@pytest.fixture
def queue(db, full, settings):
    settings.TASKS = job_worlds.TASKS
    full.restore()
    empty(OTHER)
    sequencing.identify(OTHER)  # as ``migrate`` does


@contextlib.contextmanager
def working_as(role, *, without=None):
    """This thread works as a user of a role, in both databases of the queue; ``without``: a grant that is revoked."""
    admins = {alias: connections[alias] for alias in (USING, OTHER)}
    with account(role) as own:
        if without is not None:
            with connection.cursor() as cursor:
                where = f"`{connection.settings_dict['NAME']}`.`{without.name}`"
                cursor.execute(f"REVOKE {without.privilege} ON {where} FROM '{user_of(role)}'@'%%'", [])
        there = admins[OTHER].copy()
        there.settings_dict = {**there.settings_dict, "USER": user_of(role), "PASSWORD": PASSWORD}
        _grant(role, there.settings_dict["NAME"])
        connections[USING], connections[OTHER] = own, there
        try:
            yield
        finally:
            there.close()
            for alias, admin in admins.items():
                connections[alias] = admin


def _grant(role, database):
    with connection.cursor() as cursor:
        for statement in grants.statements(role, database=database, user=user_of(role), host="%"):
            cursor.execute(statement.replace("%", "%%"), [])


# -- operations ---------------------------------------------------------------------


BY = {"actor": "ada", "reason": "test"}


def twice(operation, *arguments, **options):
    """Previews an operation, runs it, and requires that it has changed something."""
    assert operation(*arguments, **options, **BY, dry_run=True).planned
    assert operation(*arguments, **options, **BY).changed


def each(operation, *arguments, refs=REFS, **options):
    for ref in refs:
        twice(operation, *ref, *arguments, **options)


def waits(ref):
    rows = DeliveryState.objects.filter(consumer_group=ref.group, topic=ref.topic, delivered_by="", acked=False)
    # On a slow machine, others are due by now.
    return rows.order_by("-invisible_until").values_list("message_offset", flat=True)[0]


def lost():
    return SubscriberHeartbeat.objects.values_list("subscriber_name", flat=True)[0]


def dead(topic):
    return QueueMessage.objects.filter(topic=topic).values_list("offset", flat=True)[0]


def release():
    for ref in REFS:
        keys = PartitionLease.objects.filter(consumer_group=ref.group, topic=ref.topic).exclude(leased_by="")
        if ref == ORDERED:
            twice(operations.release, *ref, sorted(keys.values_list("partition_key", flat=True)))


def reset_modes():
    twice(operations.set_group_mode, *ORDERED, "shared")
    twice(operations.set_group_mode, *SHARED, "ordered")


def settings_of_groups():
    each(operations.settings, {"max_attempts": 3, "rate": "9/s"}, refs=(ORDERED, SHARED))
    each(operations.settings, unset=["max_attempts"], refs=(ORDERED, SHARED))
    twice(operations.settings, *JOBS, {"prefetch": 3})


def cancel_messages():
    twice(operations.cancel, "t", ["later 0"])
    ids = JobResult.objects.filter(status__in=("READY", "RUNNING")).values_list("id", flat=True)
    twice(operations.cancel, JOBS.topic, sorted(ids))


def retry():
    for ref in REFS:
        twice(operations.retry, *ref, at=LATER)
        twice(operations.retry, *ref, offsets=[waits(ref)], reset_attempts=True)
        twice(operations.retry, *ref, error="Error")


def pass_dead_letters(operation):
    for topic in DLQS:
        twice(operation, topic, offsets=[dead(topic)])
    twice(operation, "t")


def cancel_move():
    twice(operations.prepare_move, "t", OTHER)
    twice(operations.cancel_move, "t", OTHER)


def move():
    each(operations.seek, "latest", refs=(ORDERED, SHARED))
    twice(operations.prepare_move, "t", OTHER)
    with override_settings(MYSQLQUEUE=MOVED):
        twice(operations.move_topic, "t", OTHER)


def replay():
    first, *_, last = QueueMessage.objects.filter(topic="t").order_by("offset").values_list("offset", flat=True)
    each(operations.replay, first, last, refs=(ORDERED, SHARED))
    twice(operations.replay, *ORDERED, first, last, key="k1", run="again")


def publish_test_messages():
    twice(operations.publish, "t", 1)
    twice(operations.publish, "t", 1, delay=60, key="k1", priority=3, expires_in=90)


def edit_schedules():
    twice(operations.create_recurring, "made", job_worlds.PATH, every=60)
    twice(operations.update_recurring, "made", args=[5])
    twice(operations.delete_recurring, "made")


def import_celery_beat():
    with schedule_worlds.periodic_task():
        twice(operations.import_celery_beat)


def erase_keys():
    keys = {one.partition_key for one in QueueMessage.objects.filter(topic="t")}
    assert keys
    for key in sorted(keys, key=len)[:3]:
        operations.erase("t", key, actor="ada")


OPERATIONS = {
    "cancel": cancel_messages,
    "cancel_move": cancel_move,
    "create_recurring": lambda: twice(operations.create_recurring, "made", job_worlds.PATH, cron="0 3 * * *"),
    "dead_letter": lambda: [twice(operations.dead_letter, *ref, offsets=[waits(ref)]) for ref in REFS],
    "delete_recurring": lambda: twice(operations.delete_recurring, "gone"),
    "discard": lambda: pass_dead_letters(operations.discard),
    "drop_group": lambda: each(operations.drop_group),
    "drop_reader": lambda: twice(operations.drop_reader, "lake"),
    "edit": lambda: twice(operations.edit, "t_dlq", "edited", offset=dead("t_dlq")),
    "erase": erase_keys,
    "forget": lambda: twice(operations.forget, lost()),
    "import_celery_beat": import_celery_beat,
    "move_topic": move,
    "pause": lambda: each(operations.pause),
    "pause_recurring": lambda: twice(operations.pause_recurring, "topic"),
    "prepare_move": lambda: twice(operations.prepare_move, "t", OTHER),
    "publish": publish_test_messages,
    "delete_quarantined": lambda: twice(operations.delete_quarantined, [1]),
    "requeue_quarantined": lambda: twice(operations.requeue_quarantined, [2]),
    "redrive": lambda: pass_dead_letters(operations.redrive),
    "release": release,
    "replay": replay,
    "reschedule": lambda: [
        twice(operations.reschedule, "t", ["later 1"], when) for when in (LATER, LATER + datetime.timedelta(1), None)
    ],
    "resume": lambda: (each(operations.pause), each(operations.resume)),
    "resume_recurring": lambda: twice(operations.resume_recurring, "paused"),
    "retry": retry,
    "run_recurring": lambda: [twice(operations.run_recurring, name) for name in ("task", "topic")],
    "seek": lambda: (
        each(operations.seek, "earliest"),
        each(operations.seek, "latest"),
        each(operations.seek, time=LATER),
    ),
    "set_group_mode": reset_modes,
    "settings": settings_of_groups,
    "update_recurring": edit_schedules,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operator_runs_every_operation(queue, name):
    with working_as("operator"):
        OPERATIONS[name]()
    assert not Operation.objects.filter(actor="ada", ended_at=0).exists()


def test_every_operation_is_run():
    assert set(OPERATIONS) == {name for name in operations.__all__ if inspect.isfunction(getattr(operations, name))}


# -- commands -----------------------------------------------------------------------


LINES = {
    "reader": [
        "queuestatus",
        "queuehealth",
        "queueoperations",
        "queuerecurring",
        "queuequarantine",
        "queuescheduled",
        "queueset --list",
        "queueset g t --list",
        "queuetail t",
        "queuetail t --offset 0 --key k1",
        *(f"queuepause {ref.group} {ref.topic} --dry-run" for ref in REFS),
    ],
    "operator": [
        "queuescheduled t {later} --at 2100-01-01T00:00",
        "queuescheduled t {later} --now",
        "queuecancel t {later2}",
        "queuecancel jobs.default {job}",
        "queuerecurring --run-now task",
        "queuerecurring --pause topic",
        "queuerecurring --resume topic",
        "queuerecurring --delete gone",
        "queuequarantine --delete 1",
        "queuequarantine --requeue 2 3",
        "queuerelease g t k1",
        "queuerelease --subscriber {lost}",
        *(
            line.format(f"{ref.group} {ref.topic}")
            for ref in REFS
            for line in (
                "queuepause {}",
                "queueresume {}",
                "queueset {} prefetch=3",
                "queueset {} --unset prefetch",
                "queueretry {} --at 2100-01-01T00:00",
            )
        ),
        "queuedeadletter g t {waits}",
        *(f"queueseek {ref.group} {ref.topic} earliest" for ref in REFS),
        "queuereplayrange g t {first} {last}",
        "queueredrive t --limit 1",
        "queuediscard t --reason test",
        "queueredrive jobs.default",
        "queuegroupmode g t shared",
        "queuemove t --to queue --prepare",
        "queuemove t --to queue --cancel",
        "queuedropreader lake",
        *(f"queuedropgroup {ref.group} {ref.topic}" for ref in REFS),
    ],
    "subscriber": ["queuesequence", "queuegc --dry-run", "queuegc"],
}
"""The command lines of each role, which are run one after the other."""
ELSEWHERE = {
    "runsubscriber": "test_grants.py: it is a process",
    "queuegrants": "test_grants.py: it reads the name of the database, for which no privilege is needed",
    "queueprocedures": "needs a user who may create procedures",
    "queuearchive": "tests/pipeline: the role archiver",
    "queueerase": "test_an_operator_runs_every_operation: it runs this one, and what Spark's side does in the archive",
    "queuereport": "tests/pipeline: it reads the archive and, as queuetail does, the log",
    "queuereplay": "tests/pipeline: it publishes",
}


@pytest.mark.parametrize("role", LINES)
def test_a_role_runs_its_commands(queue, role, capsys):
    waiting = DeliveryState.objects.filter(consumer_group="g", delivered_by="", acked=False)
    offsets = QueueMessage.objects.filter(topic="t").order_by("offset").values_list("offset", flat=True)
    values = {
        "later": '"later 0"',
        "later2": '"later 1"',
        "job": JobResult.objects.filter(status="READY").values_list("id", flat=True)[0],
        "lost": lost(),
        "waits": waiting.values_list("message_offset", flat=True)[0],
        "first": offsets[0],
        "last": offsets[len(offsets) - 1],
    }
    with working_as(role):
        for line in LINES[role]:
            asks = ["--noinput"] if role == "operator" else []
            name, *arguments = shlex.split(line.format(**values))
            with contextlib.suppress(SystemExit):  # There are problems.
                call_command(name, *arguments, *asks)


def test_every_command_belongs_to_a_role():
    mine = {name for name, app in get_commands().items() if app == "django_mysqlqueue"}
    assert mine == {line.split()[0] for lines in LINES.values() for line in lines} | set(ELSEWHERE)


# -- functions ----------------------------------------------------------------------


async def publish_asynchronously():
    await apublish("t", 1)
    await apublish_many("t", [Message(1, key="k1")])


async def schedule_asynchronously():
    await areschedule("later 2", topic="t", delay=90)
    await acancel("later 2", topic="t")


def debounce_again():
    publish("t", "again", key="k0", coalesce="d", delay=60, max_delay=7200)
    publish_many("t", [Message(n, key="k1", coalesce="d", delay=60) for n in range(3)])


def enqueue():
    enqueue_many([call(jobs.add, 1), call(jobs.fail)])
    enqueue_chain([call(jobs.add, 1), call(jobs.add, 2)], call(jobs.gather))
    return jobs.add.enqueue(3)


def cancel_jobs():
    jobs.alone.enqueue(1)
    jobs.alone.enqueue(3)
    backend = jobs.add.get_backend()
    waiting = backend.get_result(JobResult.objects.filter(status="READY").values_list("id", flat=True)[0])
    running = backend.get_result(JobResult.objects.filter(status="RUNNING").values_list("id", flat=True)[0])
    for result in (waiting, running):
        result.refresh()
        progress_of(result)
        cancel_job(result)
    async_to_sync(acancel_job)(enqueue())
    result = enqueue()
    for waits_for in (wait, async_to_sync(async_wait)):
        with contextlib.suppress(TimeoutError):
            waits_for(result, timeout=0.01)


def collect_metrics():
    registry = CollectorRegistry()
    registry.register(QueueCollector())
    assert 'group="g"' in generate_latest(registry).decode()


FUNCTIONS = {
    "publisher": {
        "publish": lambda: publish("t", 1, key="k1", id="dead 0", metadata={"a": 1}, priority=3, expires_in=90),
        "publish_many": lambda: publish_many("t", (Message(n, key="k1", coalesce="c") for n in range(2000))),
        "apublish apublish_many": lambda: async_to_sync(publish_asynchronously)(),
        "enqueue_many enqueue_chain call": enqueue,
    },
    "scheduler": {
        "cancel": lambda: cancel("later 0", topic="t"),
        "reschedule": lambda: reschedule("later 1", topic="t", delay=90),
        "acancel areschedule": lambda: async_to_sync(schedule_asynchronously)(),
        "debounce": debounce_again,
        "cancel_job acancel_job wait async_wait progress_of": cancel_jobs,
    },
    "reader": {
        "check_health": lambda: inspection.check_health(inspection.HealthLimits(lag=1)),
        "count_jobs": inspection.count_jobs,
        "find_causes": inspection.find_causes,
        "find_problems": inspection.find_problems,
        "get_job": lambda: [inspection.get_job(one) for one in JobResult.objects.values_list("id", flat=True)],
        "get_message": lambda: [
            inspection.get_message("t", name) for name in ("dead 0", "fail 2", "later 1", "held 5")
        ],
        "get_overview": lambda: inspection.get_overview(window=3600),
        "list_dead_letters": lambda: [inspection.list_dead_letters(topic, error="o") for topic in DLQS],
        "list_errors": inspection.list_errors,
        "list_jobs": inspection.list_jobs,
        "list_messages": lambda: (inspection.list_messages(), inspection.list_messages(topic="t", key="k1")),
        "list_options": inspection.list_options,
        "list_partitions": lambda: (inspection.list_partitions(), inspection.list_partitions(owner="")),
        "list_quarantined": lambda: (inspection.list_quarantined(), inspection.list_quarantined(topic="t")),
        "list_scheduled": inspection.list_scheduled,
        "list_schedules": lambda: inspection.list_schedules(runs=5),
        "summarize_tasks": inspection.summarize_tasks,
        "tail": lambda: list(tails.tail("t", offset=0)),
        "atail": lambda: async_to_sync(_read)(tails.atail("t", offset=0)),
        "metrics": collect_metrics,
    },
}
"""The public functions of each role, by the names of those that they call."""
NO_STATEMENTS = {"subscriber", "recurring_message", "job", "recurring", "call"}
"""They declare something."""


async def _read(tail):
    return [one async for one in tail]


@pytest.mark.parametrize(("role", "name"), [(role, name) for role, found in FUNCTIONS.items() for name in found])
def test_a_role_calls_its_functions(queue, role, name):
    with working_as(role):
        FUNCTIONS[role][name]()


def test_every_public_function_belongs_to_a_role():
    public = {
        name
        for module in (django_mysqlqueue, inspection, tails, tasks)
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    }
    called = {name for found in FUNCTIONS.values() for names in found for name in names.split()}
    assert public - called <= NO_STATEMENTS


def test_a_subscriber_works_and_cleans_up(queue, settings, caplog):
    settings.MYSQLQUEUE = {"RETENTION": 0, "ORPHAN_RETENTION": 0, "RESULTS_RETENTION": 0}
    with working_as("subscriber"):
        sub = Sub(*full_queue.handlers(), name="heir")
        sub.settle()
        for _ in range(2):
            sub.poller.maintenance.reset()
            for _ in sub.poller.maintenance.round():
                pass
            sub.poller.write_rollups()
            sub.settle()
        publish("far", 1)
        OutboxMessage.objects.filter(topic="far").update(topic=relayed_topic("far", OTHER))
        sequence()
        while not relaying.relay(USING, OTHER).messages:
            pass
        for name in ("task", "topic"):
            schedules.tick(USING, name)
        sub.leave()
    # A subscriber logs an error of the database, and goes on. The tables of handlers are the project's.
    assert not re.search(r"denied to user .* for table \S*queue_", caplog.text)


def test_a_client_in_plain_sql_calls_every_procedure(queue):
    installing.install(USING)
    ref = GroupRef("sql", "plain")  # Only subscribers in Python keep limits and coalesce keys.
    groups.register(USING, ref, mode="shared", start="earliest")
    publish_many("plain", (Message(n, key="k") for n in range(5)))
    sequence()
    called = set()
    with account("sql-consumer"):
        client = Client(ref, user=user_of("sql-consumer"), passwd=PASSWORD)
        run = client.run

        def recorded(statement, *parameters):
            called.add(re.match(r"CALL (\w+)", statement)[1])
            return run(statement, *parameters)

        client.run = recorded
        try:
            handles = [row["handle"] for row in client.claim()]
            assert client.ack(handles[0]) == "acked"
            assert client.nack(handles[1]) == "failed"
            assert client.reject(handles[2]) == "dead_lettered"
            assert client.snooze(handles[3]) == "snoozed"
            assert client.extend(handles[4]) == "extended"
        finally:
            client.raw.close()
    assert called == set(CLIENT_PROCEDURES)


# -- a privilege less -----------------------------------------------------------------


@pytest.mark.parametrize(("operation", "arguments"), [("drop_group", ()), ("seek", ("earliest",))])
@pytest.mark.parametrize("ref", [ORDERED, JOBS], ids=str)
def test_an_operation_of_several_steps_that_lacks_a_privilege_changes_nothing(queue, full, operation, arguments, ref):
    """Otherwise the group would stay paused, with an operation that nobody may finish."""
    before = list(ConsumerGroup.objects.values())
    needed = set()
    for one in ROLES["operator"].grants:
        if one in READ:
            continue
        try:
            with working_as("operator", without=one):
                getattr(operations, operation)(*ref, *arguments, actor="ada")
            full.restore()
        except OperationalError as error:
            assert error.args[0] in DENIED  # noqa: PT017  # Without most privileges, nothing is refused.
            needed.add((one.privilege, one.name))
            assert list(ConsumerGroup.objects.values()) == before, one
            assert not Operation.objects.filter(actor="ada").exists(), one
    common = {("UPDATE", "queue_consumer_groups"), ("DELETE", "queue_delivery_state"), ("UPDATE", "queue_operations")}
    assert needed >= common | {("INSERT", "queue_operations")}
    assert (("DELETE", "queue_slots") in needed) == (operation == "drop_group")
    assert (("UPDATE", "queue_job_results") in needed) == (ref == JOBS)


def test_an_operation_that_was_interrupted_is_finished_after_a_grant(queue, monkeypatch):
    """As a release before the privileges were checked at the beginning would leave it."""
    monkeypatch.setattr(steps, "_require_privileges", lambda *arguments: None)
    with (
        working_as("operator", without=Grant("DELETE", Slots._meta.db_table)),
        pytest.raises(OperationalError, match="denied"),
    ):
        operations.drop_group(*ORDERED, actor="ada")
    assert ConsumerGroup.objects.get(consumer_group=ORDERED.group).paused
    with working_as("operator"):
        assert operations.drop_group(*ORDERED, actor="ada").changed
    assert not ConsumerGroup.objects.filter(consumer_group=ORDERED.group).exists()
    assert not Operation.objects.filter(actor="ada", ended_at=0).exists()
