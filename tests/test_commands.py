"""The management commands, as an operator types them."""

import builtins
import io
import json
import threading

import pytest
from django.core.management import CommandError, call_command
from django.core.management.base import OutputWrapper
from django.core.management.color import no_style
from django.db import connection, transaction

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.management.banner import show_banner
from django_mysqlqueue.models import (
    ConsumerGroup,
    ConsumerOffset,
    DeliveryState,
    OutboxMessage,
    PartitionLease,
    QueueMessage,
    Sequencer,
    SubscriberHeartbeat,
)
from django_mysqlqueue.operations import dropping
from django_mysqlqueue.operations.limits import Limits
from django_mysqlqueue.service import groups, heartbeats, sequencing
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import EVERYTHING
from tests.support.harness import USING, Sub, handler, lag, sequence

GROUP_STATE = (PartitionLease, ConsumerOffset, DeliveryState, SubscriberHeartbeat)


def run(*arguments, **options):
    """Runs a command and returns what it wrote."""
    out = io.StringIO()
    call_command(*arguments, stdout=out, no_color=True, **options)
    return out.getvalue()


def status():
    return json.loads(run("queuestatus", "--format", "json"))


def group_status(group="g", topic="t"):
    (found,) = (one for one in status()["groups"] if (one["group"], one["topic"]) == (group, topic))
    return found


def table(text, heading):
    """The rows below a heading, as dicts by column."""
    lines = text.splitlines()
    lines = lines[lines.index(heading) + 1 :]
    end = next((number for number, line in enumerate(lines) if not line), len(lines))
    header, *rows = ([cell.strip() for cell in line.strip().split("  ") if cell.strip()] for line in lines[:end])
    return [dict(zip(header, row, strict=True)) for row in rows]


def fail(delivery):
    raise ValueError("no")


@pytest.fixture
def answer(monkeypatch):
    """Answers the command's question; gives the questions asked."""
    asked = []

    def give(text):
        monkeypatch.setattr(builtins, "input", lambda prompt="": (asked.append(prompt), text)[1])
        return asked

    return give


@pytest.fixture
def no_question(monkeypatch):
    def refuse(prompt=""):
        raise AssertionError(f"asked: {prompt}")

    monkeypatch.setattr(builtins, "input", refuse)


# -- every command ------------------------------------------------------------

COMMANDS = [
    ("queuestatus",),
    ("queuesequence",),
    ("queuegc",),
    ("queuegc", "--dry-run"),
    ("queuedropgroup", "g", "t", "--noinput"),
    ("queuegroupmode", "g", "t", "shared", "--noinput"),
    ("runsubscriber",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_unknown_database_is_refused(db, command):
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    with pytest.raises(CommandError, match="'nowhere'"):
        run(*command, "--database", "nowhere")
    assert ConsumerGroup.objects.get().mode == "ordered"


@pytest.mark.parametrize("command", COMMANDS[:-1], ids=" ".join)
def test_the_setting_names_the_database(db, settings, command):
    """Read on each run; the router is not asked."""
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    settings.MYSQLQUEUE = {"DATABASE": USING}
    settings.DATABASE_ROUTERS = [Nowhere()]
    run(*command)


class Nowhere:
    def db_for_write(self, model, **hints):
        return "nowhere"


# -- queuestatus --------------------------------------------------------------


def test_status_of_an_empty_queue(db):
    assert "It is empty: no message, no group." in run("queuestatus")
    found = status()
    assert (found["database"], found["last_offset"], found["topics"], found["groups"]) == (USING, 0, [], [])


@pytest.mark.defect(19)
def test_lag_is_a_count_of_messages(db):
    """Other topics' messages between them raise the offsets, not the lag."""
    for number in range(20):
        publish("t", number, key=f"k{number % 3}")
        publish_many("noise", range(10))
    sequence()
    sub = Sub(handler(), handler(topic="noise", group="n"), batch_size=5, prefetch=5)
    assert group_status()["lag"] == 20
    sub.step()
    sub.work(2)
    sub.flush()
    of_t = QueueMessage.objects.filter(topic="t")
    settled = DeliveryState.objects.filter(consumer_group="g", acked=True).count()
    below = sum(
        of_t.filter(partition_key=key, offset__lte=offset).count()
        for key, offset in ConsumerOffset.objects.filter(consumer_group="g").values_list(
            "partition_key", "offset_acked"
        )
    )
    assert settled + below > 0
    assert group_status()["lag"] == 20 - settled - below
    assert {row["group"]: row["lag"] for row in table(run("queuestatus"), "Groups")}["g"] == str(20 - settled - below)
    sub.settle(rounds=500)
    assert group_status()["lag"] == 0
    assert group_status("n", "noise")["lag"] == 0
    assert group_status()["oldest_unacked_age"] is None


def test_lag_of_out_of_order_acks(db):
    """Acked above a hole counts as done although the watermark stands."""
    publish_many("t", [Message(number, key="k") for number in range(1, 6)])
    sub = Sub(handler(function=lambda delivery: delivery.nack(delay=60) if delivery.payload == 1 else None))
    sub.step()
    lags = []
    for _ in range(5):
        sub.work(1)
        sub.flush()
        lags.append(lag())
    assert lags == [5, 4, 3, 2, 1]
    found = group_status()
    assert (found["lag"], found["retrying"], found["in_flight"]) == (1, 1, 0)


def test_lag_of_a_group_that_starts_late_or_is_addressed(db):
    publish_many("t", range(4))
    sequence()
    groups.register(USING, GroupRef("late", "t"), mode="ordered", start="latest")
    groups.register(USING, GroupRef("early", "t"), mode="ordered", start="earliest")
    publish_many("t", range(3))
    OutboxMessage.objects.filter(payload=b"2").update(target_group="late")
    sequence()
    assert {one["group"]: one["lag"] for one in status()["groups"]} == {"late": 3, "early": 6}


def test_status_counts_by_topic(db, clock):
    publish_many("a", [Message(1, key="x"), Message(2, key="x"), Message(3, key="y")])
    sequence()
    publish("a", 4)
    publish_many("a", [Message(5, delay=60), Message(6, delay=7200)])
    publish("b", 1, delay=60)
    expected = [
        {"topic": "a", "in_log": 3, "partitions": 2, "waiting": 1, "scheduled": 2, "is_dlq": False},
        {"topic": "b", "in_log": 0, "partitions": 0, "waiting": 0, "scheduled": 1, "is_dlq": False},
    ]
    found = status()
    since = [one.pop("waiting_since") for one in found["topics"]]
    assert found["topics"] == expected
    assert since[0] <= found["now"]
    assert since[1] is None
    assert table(run("queuestatus"), "Topics") == [
        {"topic": "a", "in log": "3", "partitions": "2", "outbox": "1", "scheduled": "2"},
        {"topic": "b", "in log": "0", "partitions": "0", "outbox": "0", "scheduled": "1"},
    ]
    clock.advance(61)
    assert [(one["waiting"], one["scheduled"]) for one in status()["topics"]] == [(2, 1), (1, 0)]


def test_status_of_work_in_flight_and_its_owner(db):
    publish_many("t", [Message(number, key=f"k{number}") for number in range(4)])
    sub = Sub(handler(), handler(group="s", mode="shared"), name="me")
    sub.step()
    found = group_status()
    assert (found["lag"], found["in_flight"], found["retrying"]) == (4, 4, 0)
    assert found["subscribers"] == [sub.name]
    assert found["partitions_owned"] == {sub.name: 4}
    assert found["mode"] == "ordered"
    assert not status()["problems"]
    assert group_status("s")["in_flight"] == 4
    assert group_status("s")["mode"] == "shared"
    text = run("queuestatus")
    assert table(text, "Leases") == [{"group": "g", "topic": "t", "owner": sub.name, "partitions": "4"}]
    assert "Problems" not in text
    sub.settle()
    assert group_status()["in_flight"] == 0
    assert group_status("s")["in_flight"] == 0


def abandoned():
    """The groups with work and no live subscribers, and how bad that is."""
    return {one["group"]: one["severity"] for one in status()["problems"] if one["kind"] == "no_subscriber"}


@pytest.mark.defect(15)
def test_status_names_what_is_abandoned(db, clock):
    publish_many("t", range(3))
    sequence()
    groups.register(USING, GroupRef("forgotten", "t"), mode="ordered", start="earliest")
    groups.register(USING, GroupRef("idle", "empty"), mode="ordered", start="earliest")
    sub = Sub(handler(group="alive"))
    assert abandoned() == {"forgotten": 2}, "its subscribers may be being restarted"
    problems = run("queuestatus").split("Problems\n")[1]
    assert "No live subscribers for forgotten/t; 3 messages wait" in problems
    assert "alive" not in problems
    assert "idle" not in problems
    clock.advance(31)
    assert abandoned() == {"alive": 2, "forgotten": 2}, "its heartbeat is older than the lease"
    assert group_status("alive")["subscribers"] == []
    clock.advance(31)
    sub.heart.beat()
    assert abandoned() == {"forgotten": 0}


def test_status_of_dead_letters(db):
    """They are counted for the group that failed them, of its own topic."""
    publish_many("t", range(3))
    publish_many("u", range(2))
    Sub(
        handler(function=fail, max_attempts=1),
        handler(group="fine"),
        handler(topic="u", function=fail, max_attempts=1),
    ).settle()
    sequence()
    assert group_status()["dead_letters"] == 3
    assert group_status("fine")["dead_letters"] == 0
    assert group_status(topic="u")["dead_letters"] == 2
    assert {one["topic"]: (one["in_log"], one["is_dlq"]) for one in status()["topics"]} == {
        "t": (3, False),
        "t_dlq": (3, True),
        "u": (2, False),
        "u_dlq": (2, True),
    }


def test_status_names_a_paused_group(db):
    publish("t", 1)
    Sub(handler(function=fail, max_attempts=1), handler(topic="t_dlq", group="d", function=fail)).settle(rounds=4)
    ConsumerGroup.objects.filter(consumer_group="g").update(paused=True)
    assert group_status()["paused"]
    text = run("queuestatus")
    assert "g/t is paused" in text
    assert {row["group"]: row["mode"] for row in table(text, "Groups")}["g"] == "ordered (paused)"


def test_status_says_how_old_the_oldest_is(db, clock):
    publish("t", 1, key="a")
    sequence()
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    clock.advance(100)
    publish("t", 2, key="b")
    sequence()
    assert 100 <= group_status()["oldest_unacked_age"] < 160
    for seconds, shown in ((0, "1 min 4"), (7 * 60, "8 min 4"), (3 * 3600, "3 h 9 min"), (3 * 86400, "3 d 3 h")):
        clock.advance(seconds)
        assert table(run("queuestatus"), "Groups")[0]["oldest"].startswith(shown)


def test_status_says_when_it_was_sequenced(db, clock):
    assert "last offset 0, sequenced never." in run("queuestatus")
    publish("t", 1)
    sequence()
    clock.advance(50)
    offset = QueueMessage.objects.get().offset
    assert f"Queue on the database 'default': last offset {offset}, sequenced 50 s ago." in run("queuestatus")
    assert status()["last_offset"] == offset


def test_status_changes_nothing(db):
    publish_many("t", range(3))
    Sub(handler()).step()
    models = (*GROUP_STATE, OutboxMessage, QueueMessage, Sequencer, ConsumerGroup)
    before = [list(model.objects.order_by("pk").values()) for model in models]
    run("queuestatus")
    status()
    assert [list(model.objects.order_by("pk").values()) for model in models] == before


def test_unknown_format(db):
    with pytest.raises(CommandError, match="xml"):
        run("queuestatus", "--format", "xml")


# -- queuesequence ------------------------------------------------------------


def test_sequence_moves_all_that_is_due(db, monkeypatch):
    monkeypatch.setattr(sequencing.sequence, "__kwdefaults__", {"max_rows": 4, "max_bytes": 1_000_000})
    publish_many("t", range(10))
    publish("t", "later", delay=60)
    assert run("queuesequence") == "Moved 10 messages.\n"
    assert QueueMessage.objects.count() == 10
    assert OutboxMessage.objects.count() == 1
    assert run("queuesequence") == "Moved 0 messages.\n"


@pytest.mark.servers_only
def test_sequence_does_not_wait_for_another_sequencer(db):
    sequence()
    publish("t", 1)
    locked, done = threading.Event(), threading.Event()

    def hold():
        try:
            with transaction.atomic():
                list(Sequencer.objects.select_for_update())
                locked.set()
                assert done.wait(30)
        finally:
            connection.close()

    holder = threading.Thread(target=hold)
    holder.start()
    assert locked.wait(30)
    try:
        said = run("queuesequence")
    finally:
        done.set()
        holder.join()
    assert said == "Somebody else is sequencing.\nMoved 0 messages.\n"
    assert run("queuesequence") == "Moved 1 messages.\n"


# -- queuegc ------------------------------------------------------------------


@pytest.fixture
def collectable(db, settings):
    """Seven messages that group g has passed, two that it has not, in several partitions."""
    settings.MYSQLQUEUE = {"RETENTION": 0}
    publish_many("t", [Message(number, key=f"k{number % 2}") for number in range(7)])
    Sub(handler()).settle()
    publish_many("t", [Message(number, key="k0") for number in range(2)])
    sequence()


def test_dry_run_counts_and_deletes_nothing(collectable):
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    models = (*GROUP_STATE, QueueMessage)
    before = [list(model.objects.order_by("pk").values()) for model in models]
    assert run("queuegc", "--dry-run") == "Would delete 7 messages.\n"
    assert [list(model.objects.order_by("pk").values()) for model in models] == before
    assert run("queuegc").startswith("Deleted 7 messages,")
    assert run("queuegc", "--dry-run") == "Would delete 0 messages.\n"


def test_gc_deletes_what_is_passed(collectable):
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    assert run("queuegc") == "Deleted 7 messages, 1 offsets rows, 1 heartbeats.\n"
    assert QueueMessage.objects.count() == 2
    assert list(ConsumerOffset.objects.values_list("partition_key", flat=True)) == ["k0"]
    assert not SubscriberHeartbeat.objects.exists()
    assert lag() == 2


@pytest.mark.parametrize(
    ("value", "deleted"), [({"RETENTION": 3600}, 0), ({"RETENTION": None}, 0), ({"RETENTION": 0}, 7)]
)
def test_gc_keeps_the_retention(collectable, settings, value, deleted):
    settings.MYSQLQUEUE = value
    assert run("queuegc", "--dry-run") == f"Would delete {deleted} messages.\n"
    assert run("queuegc").startswith(f"Deleted {deleted} messages,")


@pytest.mark.defect(3)
def test_gc_waits_for_a_group_that_has_never_run(collectable):
    groups.register(USING, GroupRef("new", "t"), mode="ordered", start="earliest")
    assert run("queuegc", "--dry-run") == "Would delete 0 messages.\n"
    assert run("queuegc").startswith("Deleted 0 messages,")
    run("queuedropgroup", "new", "t", "--noinput")
    assert run("queuegc").startswith("Deleted 7 messages,")


# -- queuedropgroup -----------------------------------------------------------


@pytest.fixture
def two_groups(db):
    """Groups ``gone`` and ``stays`` of one topic, both with every kind of state; their subscribers have left."""
    publish_many("t", [Message(number, key=f"k{number}") for number in range(6)])
    failing = [handler(group=name, function=lambda delivery: delivery.nack(delay=60)) for name in ("gone", "stays")]
    sub = Sub(*failing, handler(group="gone", topic="u"))
    publish("u", 1)
    sub.settle()
    sub.heart.beat()
    heartbeats.deregister(USING, sub.name, list(sub.handlers))
    for model in GROUP_STATE:
        for name in ("gone", "stays"):
            assert model.objects.filter(consumer_group=name, topic="t").exists(), (model, name)
    return sub


def state_of(group, topic):
    return [model.objects.filter(consumer_group=group, topic=topic).count() for model in (ConsumerGroup, *GROUP_STATE)]


def test_drop_leaves_no_state(two_groups, no_question):
    stays, other_topic = state_of("stays", "t"), state_of("gone", "u")
    said = run("queuedropgroup", "gone", "t", "--noinput")
    assert said.splitlines() == [
        "The group gone/t and its position in every partition will be deleted.",
        "Messages that it has not settled: 6.",
        "Messages that GC keeps for it alone, and may then delete: 0.",
        "The group gone/t is dropped.",
    ]
    assert state_of("gone", "t") == [0, 0, 0, 0, 0]
    assert state_of("stays", "t") == stays
    assert state_of("gone", "u") == other_topic
    assert QueueMessage.objects.filter(topic="t").count() == 6


def test_drop_deletes_in_chunks(two_groups):
    dropping.drop(USING, GroupRef("gone", "t"), limits=Limits(rows=2))
    assert state_of("gone", "t") == [0, 0, 0, 0, 0]


def test_a_dropped_group_starts_anew(two_groups):
    run("queuedropgroup", "gone", "t", "--noinput")
    got = []
    Sub(handler(group="gone", function=lambda delivery: got.append(delivery.attempt))).settle()
    assert got == [1] * 6


def test_drop_asks(two_groups, answer):
    asked = answer("gone")
    said = run("queuedropgroup", "gone", "t")
    assert len(asked) == 1
    assert "Type the group's name" in asked[0]
    assert said.endswith("The group gone/t is dropped.\n")
    assert state_of("gone", "t") == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("text", ["", "yes", "y", "Gone", "gone ", "stays", "t"])
def test_drop_takes_only_the_name_for_an_answer(two_groups, answer, text):
    before = state_of("gone", "t")
    answer(text)
    with pytest.raises(CommandError, match=r"Nothing was changed\."):
        run("queuedropgroup", "gone", "t")
    assert state_of("gone", "t") == before


@pytest.mark.parametrize(("group", "topic"), [("gon", "t"), ("gone", "v"), ("GONE", "t"), ("gone ", "t")])
def test_drop_of_an_unknown_group_names_the_known_ones(two_groups, no_question, group, topic):
    with pytest.raises(CommandError) as raised:
        run("queuedropgroup", group, topic, "--noinput")
    text = str(raised.value)
    assert f"There is no group {group!r} of {topic!r}." in text
    for known in ("gone of t", "stays of t", "gone of u"):
        assert known in text


def test_drop_without_any_group(db):
    with pytest.raises(CommandError, match="Registered: none"):
        run("queuedropgroup", "g", "t", "--noinput")


def test_drop_warns_of_live_subscribers_and_stops_them(db):
    publish_many("t", [Message(number, key="k") for number in range(3)])
    sub = Sub(handler(), name="busy")
    sub.step()
    said = run("queuedropgroup", "g", "t", "--noinput")
    assert f"Live subscribers: {sub.name}." in said
    assert "Messages that GC keeps for it alone, and may then delete: 3." in said
    assert said.endswith("The group g/t is dropped.\n")
    assert state_of("g", "t") == [0, 0, 0, 0, 0]
    sub.settle()
    publish_many("t", [Message(number, key="k") for number in range(3)])
    sub.settle()
    assert state_of("g", "t")[0] == 0, "a claim must not bring it back"
    assert not DeliveryState.objects.exists()
    assert not ConsumerOffset.objects.exists()


def test_drop_does_not_warn_without_live_subscribers(two_groups):
    assert "Live subscribers" not in run("queuedropgroup", "gone", "t", "--noinput")


# -- queuegroupmode -----------------------------------------------------------


def test_mode_is_refused_while_somebody_works_for_the_group(db, clock):
    sub = Sub(handler(), name="busy")
    with pytest.raises(CommandError, match=f"has live subscribers: {sub.name}. Stop them before"):
        run("queuegroupmode", "g", "t", "shared", "--noinput")
    assert ConsumerGroup.objects.get().mode == "ordered"
    clock.advance(31)
    assert run("queuegroupmode", "g", "t", "shared", "--noinput") == (
        "The group g/t will be shared.\nThe group g/t is now shared.\n"
    )
    assert ConsumerGroup.objects.get().mode == "shared"


def test_a_subscriber_that_left_does_not_hold_the_mode(db):
    sub = Sub(handler())
    sub.leave()
    run("queuegroupmode", "g", "t", "shared", "--noinput")
    assert ConsumerGroup.objects.get().mode == "shared"


def test_a_live_subscriber_of_another_group_does_not_matter(db):
    Sub(handler(group="other"), handler(topic="u"))
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    run("queuegroupmode", "g", "t", "shared", "--noinput")
    assert set(ConsumerGroup.objects.filter(mode="shared").values_list("consumer_group", "topic")) == {("g", "t")}


@pytest.mark.parametrize(("before", "after"), [("ordered", "shared"), ("shared", "ordered")])
def test_nothing_is_lost_or_doubled_over_a_change_of_mode(db, before, after):
    """Some are settled, some wait out a backoff, some were never claimed; the mode changes between."""
    got = []

    def first(delivery):
        if delivery.payload in (1, 4):
            delivery.nack(delay=0)
        else:
            got.append(delivery.payload)

    publish_many("t", [Message(number, key=f"k{number % 2}") for number in range(10)])
    sub = Sub(handler(function=first, mode=before), batch_size=3, prefetch=3)
    sub.step()
    sub.work(4)
    sub.leave()
    assert 0 < len(got) < 8
    run("queuegroupmode", "g", "t", after, "--noinput")
    Sub(handler(function=lambda delivery: got.append(delivery.payload), mode=after)).settle()
    assert sorted(got) == list(range(10))
    assert lag() == 0


def test_mode_of_an_unknown_group(db):
    with pytest.raises(CommandError, match=r"There is no group 'g' of 't'\. Registered: none\."):
        run("queuegroupmode", "g", "t", "shared", "--noinput")


def test_unknown_mode(db):
    with pytest.raises(CommandError, match="parallel"):
        run("queuegroupmode", "g", "t", "parallel")


# -- at three in the morning ---------------------------------------------------


def test_status_with_every_subscriber_down(db, clock):
    """Nobody moves the outbox: the plainest outage must not look like a quiet night."""
    sub = Sub(handler())
    sub.settle()
    sub.leave()
    publish_many("t", range(3))
    publish("t", 4, delay=60)
    clock.advance(20)
    group = group_status()
    assert (group["lag"], abandoned()) == (0, {"g": 2})
    assert 19 < group["oldest_unacked_age"] < 25
    assert "No live subscribers for g/t; 3 messages wait, the oldest for 20 s." in run("queuestatus")
    Sub(handler())
    assert not abandoned()


def test_retrying_counts_failures_and_not_what_was_given_back(db):
    publish_many("t", [Message(n, key="k") for n in range(4)])
    sub = Sub(handler(function=lambda delivery: delivery.nack(60)))
    sub.step()
    sub.work(1)
    sub.leave()
    group = group_status()
    assert (group["lag"], group["retrying"], group["in_flight"]) == (4, 1, 0)


def test_a_mistyped_topic_is_named_at_the_start(db, capsys):
    publish("orders", 1)
    sequence()
    out = OutputWrapper(io.StringIO())
    one = handler(topic="order")
    show_banner(
        out, no_style(), title="x", using="default", handlers={one.ref: one}, settings=get_settings(), threads=1,
        batch_size=1, subset=EVERYTHING,
    )  # fmt: skip
    assert "nothing is in the topic 'order'; topics without a handler here: orders." in out._out.getvalue()
