"""Incidents, as states of the queue: staged by what the running system does, and told in the figures of plain SQL."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from typing import Any

from django.core.management import CommandError, call_command
from django.db import connection, connections
from django.template.defaultfilters import filesizeformat
from django.utils import formats, timezone

from django_mysqlqueue import Message, publish_many, subscriber
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.tasks import job
from tests.app import jobs
from tests.support import figures, garbage, job_worlds
from tests.support.harness import USING, Sub, handler, holding, sequence
from tests.support.internals import GroupRef, heartbeats, registry
from tests.support.queue_states import Group, Headline, Stage, State, problems

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

AGAIN = Backoff(initial=10, factor=1, jitter=0)
MANY = 12_000
"""More than pages, health checks and metrics count."""


class PartnerTimeout(Exception):
    pass


@task
@job(max_attempts=2, backoff={"initial": 10, "maximum": 10})
def charge(number: int) -> None:
    raise ValueError("no")


def clock_text(at: int | None, now: int) -> str:
    """A time of day; with the date if it is not today."""
    if at is None:
        return ""
    then, today = (timezone.localtime(datetime.datetime.fromtimestamp(one / 1000, datetime.UTC)) for one in (at, now))
    is_today = then.date() == today.date()
    return formats.time_format(then) if is_today else formats.date_format(then, "SHORT_DATETIME_FORMAT")


def declared(stage: Stage, topic: str, group: str, function: Any, **options: Any) -> Sub:
    subscriber(topic, group=group, mode="shared", start="earliest", atomic=False, backoff=AGAIN, **options)(function)
    return stage.live(registry.handlers()[GroupRef(group, topic)])


def rounds(stage: Stage, sub: Sub, number: int) -> None:
    for _ in range(number):
        sub.settle()
        sub.poller.write_rollups()
        stage.wait(65)


def failures(where: str = "1 = 1") -> tuple[int, int]:
    """The number of failed attempts, and when the first one ended."""
    ((number, first),) = figures.rows(
        "SELECT COUNT(*), MIN(e.settled_at) FROM queue_delivery_events e "
        f"JOIN queue_messages m ON m.`offset` = e.message_offset WHERE e.outcome = 'failed' AND {where}"
    )
    return number, first


def a_poison_tenant(stage: Stage) -> State:
    def handle(delivery: Any) -> None:
        if delivery.key == "tenant-13":
            raise PermissionError("no access")
        if delivery.payload == 0:
            raise ValueError("no")

    sub = declared(stage, "invoices", "billing", handle, max_attempts=9)
    stage.wait(70)
    publish_many("invoices", [Message(n, key=f"tenant-{n % 20}") for n in range(100)])
    rounds(stage, sub, 3)
    number, since = failures("m.partition_key = 'tenant-13'")
    soon = figures.one(
        "SELECT COUNT(*) FROM queue_delivery_state WHERE acked = 0 AND retry_count > 0 AND partition_key = 'tenant-13'"
    )
    began, total = clock_text(since, stage.now), failures()[0]
    text = f"{number} of {total} failures of billing/invoices since {began} have the key 'tenant-13'"
    return State(
        {"billing/invoices": Group(lag=6, age=195, retrying=6, subscribers=1)},
        problems((0, "retrying", "billing/invoices"), (2, "stuck", "billing/invoices")),
        headlines=(
            Headline(
                text,
                since,
                "PermissionError: no access",
                messages=6,
                costs=f"2 partitions · 6 waiting messages · up to {soon} messages will be dead-lettered within ",
            ),
        ),
    )


def a_provider_outage(stage: Stage) -> State:
    is_down = False

    def handle(delivery: Any) -> None:
        if is_down:
            raise PartnerTimeout("no answer")

    sub = declared(stage, "parcels", "shipping", handle, max_attempts=9)
    publish_many("parcels", [Message(n, key=f"k{n}") for n in range(30)])
    rounds(stage, sub, 1)
    is_down = True
    publish_many("parcels", [Message(n, key=f"k{n % 8}") for n in range(25)])
    rounds(stage, sub, 2)
    number, first = failures()
    since = first // 60_000 * 60_000
    began = clock_text(since, stage.now)
    text = f"shipping/parcels: every attempt has failed since {began} ({number} of {number}): PartnerTimeout"
    costs = "8 partitions · 25 waiting messages · up to 25 messages will be dead-lettered within "
    return State(
        {"shipping/parcels": Group(lag=25, age=130, retrying=25, subscribers=1)},
        problems((0, "failing", "shipping/parcels"), (2, "stuck", "shipping/parcels")),
        headlines=(Headline(text, since, f"{__name__}.PartnerTimeout: no answer", 25, costs),),
    )


def all_workers_are_dead(stage: Stage) -> State:
    subs = [Sub(handler("orders", "mail")) for _ in range(2)]
    publish_many("orders", [Message(n, key=f"k{n % 6}") for n in range(12)])
    for sub in subs * 2:
        sub.step()
    subs[0].work(1)
    subs[0].flush()
    stage.wait(200)
    waiting = figures.one("SELECT COUNT(*) FROM queue_delivery_state WHERE acked = 0")
    since = figures.one("SELECT MAX(heartbeat_at) FROM queue_subscriber_heartbeats")
    text = f"No subscriber is running; {waiting} messages are waiting, the oldest for 3 min 20 s."
    return State(
        {"mail/orders": Group(lag=11, age=200, in_flight=11)},
        problems((0, "no_subscriber", "mail/orders"), (2, "silent", "mail/orders")),
        headlines=(Headline(text, since, messages=waiting, costs=f"{waiting} waiting messages · since "),),
    )


def a_slow_database(stage: Stage) -> State:
    slow, fast = stage.live(), stage.live()
    for sub, took in ((slow, 400_000), (fast, 3000)):
        facts = {"p50_us": took, "p95_us": 3 * took}
        heartbeats.beat(USING, sub.name, [GroupRef("g", "t")], {}, facts)
    text = f"half of the polls of 1 of 2 live subscribers take longer than 250 ms; those of {slow.name} take 400 ms "
    return State({"g/t": Group(subscribers=2)}, problems((1, "slow_database")), headlines=(Headline(text),))


def a_rollout_with_a_changed_mode(stage: Stage) -> State:
    subscriber("t", group="g")(lambda delivery: None)
    stage.live(handler(mode="shared"))
    for name in ("web-1", "web-2"):
        stage.wait(10)
        with contextlib.suppress(CommandError):
            call_command("runsubscriber", "--drain", "--name", name)
    stage.wait(120)
    ((number, since),) = figures.rows(
        "SELECT COUNT(*), MIN(heartbeat_at) FROM queue_subscriber_heartbeats WHERE consumer_group = ''"
    )
    return State(
        {"g/t": Group(subscribers=1)},
        problems((1, "refused"), (1, "mode", "g/t")),
        headlines=(
            Headline(f"{number} subscribers of release ", since),
            Headline("g/t is registered as shared, but "),
        ),
    )


def many_messages_that_arrive(stage: Stage) -> State:
    sub = stage.live(handler("imports", "loader"))
    publish_many("imports", [Message(n, key=f"k{n % 8}") for n in range(MANY)])
    sequence()
    stage.wait(30)
    sub.step()
    sub.work(40)
    sub.flush()
    stage.wait(1)
    claimed = figures.one("SELECT COUNT(*) FROM queue_delivery_state WHERE acked = 0")
    return State({"loader/imports": Group(lag=MANY - 40, age=31, in_flight=claimed, subscribers=1)})


def many_messages_with_a_sample(stage: Stage) -> State:
    found = many_messages_that_arrive(stage)
    for _ in stage.subs[0].poller.maintenance.round():
        pass
    stage.wait(30)
    return State({ref: dataclasses.replace(group, age=61) for ref, group in found.groups.items()})


def a_held_sequencer(stage: Stage) -> State:
    """On SQLite, a lock of the sequencer is one of the whole database: there, nobody moves the messages."""
    stage.live()
    publish_many("t", range(3))
    if connection.vendor == "mysql":
        stage.ends.enter_context(
            holding(lambda: connections[USING].cursor().execute("SELECT id FROM queue_sequencer FOR UPDATE"))
        )
    stage.wait(40)
    since = figures.one("SELECT MIN(created_at) FROM queue_outbox")
    text = "The outbox is stalled: 3 messages are waiting to be moved into the log, the oldest for 40 s."
    return State(
        {"g/t": Group(age=40, subscribers=1)},
        problems((0, "outbox")),
        outbox=3,
        headlines=(Headline(text, since, messages=3),),
    )


def a_forgotten_group(stage: Stage) -> State:
    stage.settings.MYSQLQUEUE = {"RETENTION": 3600}
    sub = stage.live()
    stage.register("forgotten")
    stage.log(20)
    sub.settle()
    stage.wait(8000)
    assert garbage.collect(USING).messages == 0
    text = "No live subscribers for forgotten/t; 20 messages are waiting, the oldest for 2 h 13 min."
    size = figures.one("SELECT (AVG(size) + 350) * 1.3 * COUNT(*) FROM queue_messages")
    return State(
        {"g/t": Group(subscribers=1), "forgotten/t": Group(lag=20, age=8000)},
        problems((0, "no_subscriber", "forgotten/t")),
        headlines=(
            Headline(text, messages=20, costs=f"≈ {filesizeformat(round(size))} of disk · oldest message since "),
        ),
    )


def a_disk_filled_by_retention(stage: Stage) -> State:
    stage.settings.MYSQLQUEUE = {"RETENTION": None}
    sub = stage.live()
    publish_many("t", [Message("x" * 1000, key=f"k{n % 4}") for n in range(300)])
    sub.settle()
    stage.wait(200_000)
    assert garbage.collect(USING).messages == 0
    return State({"g/t": Group(subscribers=1)})


def a_task_that_fails(stage: Stage) -> State:
    stage.settings.TASKS = job_worlds.TASKS
    sub = stage.live(registry.handlers()[job_worlds.JOBS])
    stage.wait(70)
    for _ in range(3):
        for n in range(6):
            jobs.add.enqueue(n)
            charge.enqueue(n)
        rounds(stage, sub, 1)
    sequence()
    jobs.add.enqueue(3)
    sequence()
    ref = str(job_worlds.JOBS)
    number, first = figures.rows("SELECT COUNT(*), MIN(settled_at) FROM queue_delivery_events")[0]
    waiting = figures.one("SELECT COUNT(*) FROM queue_delivery_state WHERE acked = 0 AND retry_count > 0")
    text = (
        f"charge: every attempt has failed since {clock_text(first, stage.now)} ({number} failures of 18 jobs of {ref})"
    )
    return State(
        {ref: Group(lag=waiting + 1, age=65, retrying=waiting, dead_letters=12, subscribers=1)},
        problems((0, "retrying", ref), (0, "recent_dead_letters", ref), (1, "dead_letters", ref), (2, "stuck", ref)),
        headlines=(Headline(text, first, "ValueError: no", messages=waiting),),
    )


INCIDENTS = [
    a_poison_tenant,
    a_provider_outage,
    all_workers_are_dead,
    a_slow_database,
    a_rollout_with_a_changed_mode,
    many_messages_that_arrive,
    many_messages_with_a_sample,
    a_held_sequencer,
    a_forgotten_group,
    a_disk_filled_by_retention,
    a_task_that_fails,
]
