"""A range of the log is replayed into one group."""

from __future__ import annotations

import json

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, operations, publish, publish_many
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.filter_policies import parse
from django_mysqlqueue.models import ConsumerGroup, Operation, OutboxMessage, QueueMessage
from django_mysqlqueue.operations import dropping, redriving, replaying
from django_mysqlqueue.operations.limits import OperationLimits
from django_mysqlqueue.operations.replaying import Range
from tests.support.handlers import Recorder, both_modes, fail
from tests.support.harness import USING, Sub, handler, in_thread, lag, sequence
from tests.support.internals import DeadLetterFilter
from tests.support.scenarios import G, log, offsets_of

ME = "ada"


def settled(count=6, *, mode="ordered", keys="ab"):
    """Two groups have handled some messages; returns their subscriber, what each got from now on, and the offsets."""
    got, other = Recorder(), Recorder()
    sub = Sub(handler("t", "g", got, mode=mode), handler("t", "h", other, mode=mode))
    offsets = log(count, keys=keys)
    sub.settle()
    assert sorted(got.payloads) == sorted(other.payloads) == list(range(count))
    got.deliveries.clear()
    other.deliveries.clear()
    return sub, got, other, offsets


@both_modes
def test_only_the_group_gets_the_range_and_its_position_stays(db, mode):
    sub, got, other, offsets = settled(mode=mode)
    preview = operations.replay(*G, offsets[1], offsets[4], actor=ME, dry_run=True)
    assert (preview.planned, preview.unsettled, preview.upto, preview.changed) == (4, 0, offsets[4], 0)
    assert not OutboxMessage.objects.exists()
    found = operations.replay(*G, offsets[1], offsets[4], actor=ME, reason="a bug")
    assert (found.planned, found.changed, found.upto) == (4, 4, offsets[4])
    assert found.summary == ("Messages published again for the group g/t: 4.",)
    publish("t", "later", key="a")
    sub.settle()
    assert sorted(got.payloads[:-1]) == [1, 2, 3, 4]
    assert got.payloads[-1] == other.payloads[-1] == "later"
    assert len(other.payloads) == 1
    assert lag("g") == lag("h") == 0
    row = Operation.objects.get()
    assert (row.action, row.consumer_group, row.topic, row.actor, row.reason) == ("replay", "g", "t", ME, "a bug")
    assert (row.changed, row.detail) == (4, f"offsets {offsets[1]} to {offsets[4]}, run {found.run}")
    assert row.ended_at


def test_a_copy_has_the_partition_of_its_original_and_says_where_it_comes_from(db, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": 3}}}
    got = Recorder()
    sub = Sub(handler("t", "g", got))
    publish_many(
        "t",
        [
            Message(1, key="k", metadata={"a": "ü"}, priority=7, expires_in=1000, id="x"),
            Message(b"\x00\xff", key="k", coalesce="c", metadata={"content_type": "image/png"}, id="y"),
            Message({"n": 2}, id="z"),
        ],
    )
    sequence()
    originals = {one.message_id: one for one in QueueMessage.objects.all()}
    sub.settle()
    first, second = list(got.deliveries)[:2]
    got.deliveries.clear()
    offsets = offsets_of()
    run = operations.replay(*G, offsets[0], offsets[-1], run="r.1", actor=ME).run
    sub.settle()
    assert run == "r.1"
    copies = {one.metadata["replayed_from"]["id"]: one for one in QueueMessage.objects.filter(target_group="g")}
    assert set(copies) == {"x", "y", "z"}
    for name, copy in copies.items():
        original = originals[name]
        assert copy.message_id == f"replay-r.1-{original.offset}"
        assert (copy.partition_key, bytes(copy.payload)) == (original.partition_key, bytes(original.payload))
        assert copy.metadata.pop("replayed_from") == {
            "run": "r.1",
            "topic": "t",
            "offset": original.offset,
            "id": name,
            "published_at": original.published_at,
        }
        assert (copy.metadata, copy.publisher_key) == (original.metadata, original.publisher_key)
        assert (copy.expires_at, copy.coalesce_key) == (None, None)
    assert originals["x"].expires_at
    assert originals["y"].coalesce_key
    by_payload = {repr(one.payload): one for one in got.deliveries}
    assert set(by_payload) == {"1", repr(b"\x00\xff"), repr({"n": 2})}
    assert by_payload["1"].key == first.key == second.key == "k"
    assert by_payload["1"].metadata["a"] == "ü"


@pytest.mark.parametrize("size", [1, 2, 200])
def test_the_order_of_each_key_is_kept_and_every_step_is_told(db, size):
    sub, got, _other, offsets = settled(9, keys="abc")
    steps = []
    wanted = Range(G, offsets[0], offsets[-1], "r")
    found = replaying.publish_copies(
        USING, wanted, upto=wanted.last, actor=ME, progress=steps.append, limits=OperationLimits(dead_letters=size)
    )
    assert (found.replayed, sum(steps), max(steps)) == (9, 9, min(size, 9))
    sub.settle()
    by_key = {}
    for delivery in got.deliveries:
        by_key.setdefault(delivery.key, []).append(delivery.payload)
    assert by_key == {"a": [0, 3, 6], "b": [1, 4, 7], "c": [2, 5, 8]}


def test_one_partition_only(db):
    sub, got, _other, offsets = settled()
    assert operations.replay(*G, offsets[0], offsets[-1], key="b", actor=ME).changed == 3
    sub.settle()
    assert got.payloads == [1, 3, 5]
    assert operations.replay(*G, offsets[0], offsets[-1], key="none", actor=ME).changed == 0
    assert "partition 'none'" in Operation.objects.latest("id").detail


@pytest.mark.promise("Interrupted operations")
@pytest.mark.parametrize("sequenced", [False, True])
def test_a_replay_that_is_run_again_publishes_what_is_missing(db, monkeypatch, sequenced):
    sub, got, _other, offsets = settled()
    ended = []

    def once(number):
        ended.append(number)
        raise KeyboardInterrupt

    wanted = Range(G, offsets[0], offsets[-1], "r")
    with pytest.raises(KeyboardInterrupt):
        replaying.publish_copies(
            USING, wanted, upto=wanted.last, actor=ME, progress=once, limits=OperationLimits(dead_letters=2)
        )
    assert ended == [2]
    if sequenced:
        sequence()
    preview = operations.replay(*G, offsets[0], offsets[-1], run="r", actor=ME, dry_run=True)
    assert (preview.planned, preview.already_published) == (4, 2)
    found = operations.replay(*G, offsets[0], offsets[-1], run="r", actor=ME)
    assert (found.changed, found.already_published) == (4, 2)
    again = operations.replay(*G, offsets[0], offsets[-1], run="r", actor=ME)
    assert (again.changed, again.already_published) == (0, 6)
    assert "Left out because this run has published them before: 6." in again.summary
    sub.settle()
    assert sorted(got.payloads) == list(range(6))
    assert list(Operation.objects.order_by("id").values_list("changed", flat=True)) == [2, 4, 0]


def test_two_replays_of_one_run_at_the_same_time_deliver_once(db, monkeypatch):
    """Neither sees the copies of the other one: the sequencer drops the second ones."""
    sub, got, _other, offsets = settled()
    monkeypatch.setattr(replaying, "_in_outbox", lambda session, wanted: set())
    for _ in range(2):
        assert operations.replay(*G, offsets[0], offsets[-1], actor=ME).changed == 6
    assert OutboxMessage.objects.count() == 12
    sub.settle()
    assert sorted(got.payloads) == list(range(6))


def test_another_run_replays_once_more_but_no_copies(db):
    sub, got, _other, offsets = settled(2)
    for run in ("", "again"):
        last = offsets_of()[-1]
        assert operations.replay(*G, offsets[0], last, run=run, actor=ME).changed == 2
        sub.settle()
    assert sorted(got.payloads) == [0, 0, 1, 1]


@pytest.mark.parametrize("sequenced", [False, True])
def test_a_run_is_for_one_group(db, sequenced):
    """Its ids do not contain the group: the second group's copies would be taken for those of the first."""
    _sub, _got, _other, offsets = settled()
    operations.replay("g", "t", offsets[0], offsets[2], run="fix", actor=ME)
    if sequenced:
        sequence()
    for dry_run in (True, False):
        with pytest.raises(
            OperationRefused, match=f"'fix' has replayed the message at offset {offsets[0]} to the group 'g'"
        ):
            operations.replay("h", "t", offsets[0], offsets[2], run="fix", actor=ME, dry_run=dry_run)
    assert operations.replay("h", "t", offsets[0], offsets[2], run="fix-h", actor=ME).changed == 3


def test_a_message_that_gc_deletes_meanwhile_is_not_counted(db, monkeypatch):
    _sub, _got, _other, offsets = settled()
    chosen = replaying._choose

    def choose(session, *arguments):
        found = chosen(session, *arguments)
        QueueMessage.objects.filter(offset=offsets[1]).delete()
        return found

    monkeypatch.setattr(replaying, "_choose", choose)
    assert operations.replay(*G, offsets[0], offsets[2], actor=ME).changed == 2
    assert Operation.objects.get().changed == OutboxMessage.objects.count() == 2


def test_messages_that_are_not_for_the_group_or_repeat_others_are_left_out(db):
    log(2, keys="a")
    group = Sub(handler("t", "g", fail, max_attempts=1), handler("t", "h", fail, max_attempts=1))
    group.settle()
    sequence()
    for name in ("g", "h"):
        assert redriving.redrive_all(USING, DeadLetterFilter("t_dlq", group=name), actor=ME, limit=1) == 1
    (offset,) = QueueMessage.objects.filter(topic="t_dlq", failed_group="g").values_list("offset", flat=True)
    redriving.replace(USING, "t_dlq", offset, "edited", actor=ME)
    sequence()
    offsets = offsets_of()
    assert len(offsets) == 5  # two, one redriven for each group, and the edited one
    preview = operations.replay(*G, offsets[0], offsets[-1], actor=ME, dry_run=True)
    assert (preview.planned, preview.left_out, preview.unsettled) == (3, 2, 1)
    assert preview.warnings == ("The group has not settled 1 of these messages and will get them twice.",)
    operations.replay(*G, offsets[0], offsets[-1], actor=ME)
    copied = OutboxMessage.objects.values_list("payload", flat=True)
    assert sorted(json.dumps(json.loads(bytes(one))) for one in copied) == ['"edited"', "0", "1"]


def test_the_filter_of_now_decides_and_is_told(db):
    got = Recorder()
    sub = Sub(handler("t", "g", got))
    publish_many("t", [Message(n, metadata={"region": "eu" if n % 2 else "us"}) for n in range(4)])
    sub.settle()
    got.deliveries.clear()
    offsets = offsets_of()
    operations.settings(*G, {"filter": {"region": ["eu"]}}, actor=ME)
    preview = operations.replay(*G, offsets[0], offsets[-1], actor=ME, dry_run=True)
    assert (preview.planned, preview.filtered) == (2, 2)
    assert "Left out because the filter of the group does not match: 2." in preview.summary
    assert operations.replay(*G, offsets[0], offsets[-1], actor=ME).changed == 2
    sub.settle()
    assert sorted(got.payloads) == [1, 3]
    ConsumerGroup.objects.update(overrides={"filter": {"value": {"a": [{"unknown": 1}]}, "at": 1, "by": ME}})
    for dry_run in (True, False):
        with pytest.raises(OperationRefused, match="cannot be parsed by this release"):
            operations.replay(*G, offsets[0], offsets[-1], run="x", actor=ME, dry_run=dry_run)


def test_messages_for_the_group_alone_are_replayed_whatever_its_filter_says(db):
    """As when they were claimed: a filter does not decide about a message with a target group."""
    got = Recorder()
    sub = Sub(
        handler("t", "g", lambda delivery: fail(delivery) if delivery.payload == 1 else got(delivery), max_attempts=1)
    )
    publish("t", 1, metadata={"region": "us"})
    sub.settle()
    sequence()
    (offset,) = QueueMessage.objects.filter(topic="t_dlq").values_list("offset", flat=True)
    redriving.replace(USING, "t_dlq", offset, "edited", actor=ME)
    sub.settle()
    operations.settings(*G, {"filter": {"region": ["eu"]}}, actor=ME)
    offsets = offsets_of()
    preview = operations.replay(*G, offsets[0], offsets[-1], actor=ME, dry_run=True)
    assert (preview.planned, preview.filtered) == (1, 1)
    assert operations.replay(*G, offsets[0], offsets[-1], actor=ME).changed == 1
    sub.settle()
    assert got.payloads == ["edited", "edited"]


def test_the_preview_counts_what_the_group_has_not_settled(db):
    """Settled ones, one in backoff, one that was passed, and those that no one has claimed."""
    publish_many("t", [Message(n, key="a", metadata={"skip": n == 2}) for n in range(4)])
    publish_many("t", [Message(n, key="b") for n in range(4, 6)])
    sequence()
    nack_one = lambda delivery: delivery.nack(3600) if delivery.payload == 1 else None  # noqa: E731
    Sub(handler("t", "g", nack_one, filter=parse({"skip": [False]}))).settle()
    operations.settings(*G, {"filter": {"skip": [{"exists": True}, {"exists": False}]}}, actor=ME)
    offsets = offsets_of()
    preview = operations.replay(*G, offsets[0], offsets[-1], actor=ME, dry_run=True)
    # The messages of b have no metadata, so the filter passed them, too.
    assert (preview.planned, preview.unsettled) == (6, 1)
    publish_many("t", [Message(n, key="b") for n in range(6, 8)])
    sequence()
    offsets = offsets_of()
    assert operations.replay(*G, offsets[0], offsets[-1], actor=ME, dry_run=True).unsettled == 3
    operations.seek(*G, "latest", actor=ME)
    assert operations.replay(*G, offsets[0], offsets[-1], actor=ME, dry_run=True).unsettled == 0


@pytest.mark.parametrize("merged", [50, 1])
def test_a_limit_ends_where_its_preview_said(db, monkeypatch, merged):
    """With few partitions, and with so many that the log is walked."""
    monkeypatch.setattr(replaying, "MERGED", merged)
    sub, got, _other, offsets = settled(7, keys="abc")
    log(3, topic="between")
    publish("t", 7, key="a")
    sub.settle()
    got.deliveries.clear()
    last = offsets_of()[-1]
    first, done = offsets[0], []
    while first <= last:
        preview = operations.replay(*G, first, last, limit=3, actor=ME, dry_run=True)
        found = operations.replay(*G, first, last, limit=3, actor=ME)
        assert (found.changed, found.upto) == (preview.planned, preview.upto)
        done.append(found.changed)
        if found.upto < last:
            text = f"This covers the offsets up to {found.upto}. To continue, replay from offset {found.upto + 1}."
            assert text in found.summary
            assert text in preview.summary
        first = found.upto + 1
    assert [number for number in done if number] == [3, 3, 2]
    sub.settle()
    assert sorted(got.payloads) == list(range(8))


@pytest.mark.parametrize("merged", [50, 1])
def test_with_a_limit_no_more_is_read_than_a_bound(db, monkeypatch, merged):
    monkeypatch.setattr(replaying, "MERGED", merged)
    Sub(handler("t", "g"))
    operations.settings(*G, {"filter": {"never": ["x"]}}, actor=ME)
    offsets = log(40)
    wanted = Range(G, offsets[0], offsets[-1], "r")
    found = replaying.preview(USING, wanted, most=3, limits=OperationLimits(rows=5, read=10))
    assert (found.replayed, found.upto) == (0, offsets[found.filtered - 1])
    assert 10 <= found.filtered <= 12


@pytest.mark.parametrize("merged", [50, 1])
@pytest.mark.parametrize("rows", [1, 2, 100])
def test_without_a_limit_the_whole_range_is_replayed(db, monkeypatch, merged, rows):
    """However few rows a step reads, and although messages of another topic are between and behind them."""
    monkeypatch.setattr(replaying, "MERGED", merged)
    sub, got, _other, offsets = settled(3, keys="abc")
    log(3, topic="between")
    offsets += log(2)
    log(3, topic="between")
    sub.settle()
    got.deliveries.clear()
    last = QueueMessage.objects.latest("offset").offset
    limits = OperationLimits(rows=rows, dead_letters=2, read=2)
    found = replaying.publish_copies(USING, Range(G, offsets[0], last, "r"), upto=last, actor=ME, limits=limits)
    assert (found.replayed, found.upto) == (5, last)
    sub.settle()
    assert len(got.payloads) == 5


def test_the_operation_tells_its_progress_and_names_its_run_after_its_arguments(db, monkeypatch):
    _sub, _got, _other, offsets = settled(3)
    steps = []
    found = operations.replay(*G, offsets[0], offsets[1], actor=ME, progress=steps.append)
    assert steps == [2]
    assert len(found.run) == 16
    again = [operations.replay(*G, offsets[0], last, actor=ME, dry_run=True) for last in offsets[1:]]
    assert [(one.run == found.run, one.already_published) for one in again] == [(True, 2), (False, 0)]
    monkeypatch.setattr(replaying, "COUNTED", 2)
    for limit, number in ((None, "2 or more"), (2, "2"), (3, "3")):
        said = operations.replay(*G, offsets[0], offsets[-1], limit=limit, run="x", actor=ME, dry_run=True).summary
        assert said[0].endswith(f"will get again: {number}."), said
    nothing = operations.replay(*G, offsets[0], offsets[0], key="none", actor=ME, dry_run=True).summary
    assert nothing == (f"No message at the offsets {offsets[0]} to {offsets[0]} is to be replayed into the group g/t.",)


def test_copies_are_found_among_the_newest_rows_of_the_outbox(db, monkeypatch):
    _sub, _got, _other, offsets = settled(2)
    publish_many("t", [Message(n, key="z") for n in range(3)])
    assert operations.replay(*G, offsets[0], offsets[-1], run="r", actor=ME).changed == 2
    monkeypatch.setattr(replaying, "NEWEST", 2)
    assert operations.replay(*G, offsets[0], offsets[-1], run="r", actor=ME).already_published == 2


def test_copies_of_other_runs_and_topics_are_not_those_of_a_run(db):
    """While they are in the outbox. In LIKE, an underscore stands for any character."""
    Sub(handler("t", "g"), handler("u", "h"))
    here, there = log(2), log(2, topic="u")
    for run in ("axb", "a_b"):
        for ref, offsets in ((G, here), (("h", "u"), there)):
            assert operations.replay(*ref, offsets[0], offsets[-1], run=run, actor=ME).changed == 2


def test_the_number_of_statements_does_not_depend_on_partitions(db):
    sub = Sub(handler("t", "g"))
    counts = []
    for number in (60, 200):
        publish_many("t", (Message(n, key=f"k{number}.{n}") for n in range(number)))
        sub.settle()
        offsets = offsets_of()
        with CaptureQueriesContext(connection) as sent:
            assert operations.replay(*G, offsets[-60], offsets[-1], limit=100, actor=ME, dry_run=True).planned == 60
        counts.append(len(sent))
    assert counts[0] == counts[1] <= 20


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"group": "nobody"}, "There is no group 'nobody' on topic 't'"),
        ({"first": 0}, "first 0: must be an integer from 1"),
        ({"last": 0}, "last 0: must be an integer from 1"),
        ({"first": 3, "last": 2}, "last 2: must be at least the first offset, 3"),
        ({"last": 10**9}, r"last 1000000000: the log ends at \d+"),
        ({"key": 1}, "key 1: must be a str"),
        ({"run": "a b"}, "run 'a b': must be 1 to 60 characters"),
        ({"limit": 0}, "limit 0: must be an integer of at least 1"),
        ({"topic": "t_dlq"}, "topic 't_dlq': dead letters are redriven, not replayed"),
    ],
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_range_that_is_not_possible_is_refused(db, arguments, says, dry_run):
    Sub(handler("t", "g"), handler("t_dlq", "g"))
    log(3)
    given = {"group": "g", "topic": "t", "first": 1, "last": 1} | arguments
    with pytest.raises(OperationRefused, match=says):
        operations.replay(**given, actor=ME, dry_run=dry_run)
    assert not Operation.objects.exists()


def test_jobs_are_not_replayed(db, monkeypatch):
    settled(1)
    monkeypatch.setattr(replaying, "is_of_jobs", lambda ref: True)
    with pytest.raises(OperationRefused, match="a job runs once"):
        operations.replay(*G, 1, 1, actor=ME)


@pytest.mark.parametrize("what", ["a seek", "a drop", "dropped"])
def test_it_stops_if_the_group_is_sought_or_dropped_meanwhile(db, what):
    _sub, _got, _other, offsets = settled()

    def meanwhile(number):
        if what == "dropped":
            in_thread(lambda: dropping.drop(USING, G, actor="bob"))
        else:
            after = "dropped" if what == "a drop" else "resume"
            in_thread(lambda: ConsumerGroup.objects.filter(consumer_group="g").update(after_seek=after, paused=True))

    wanted = Range(G, offsets[0], offsets[-1], "r")
    with pytest.raises(OperationRefused, match=r"has not finished|There is no group"):
        replaying.publish_copies(
            USING, wanted, upto=wanted.last, actor=ME, progress=meanwhile, limits=OperationLimits(dead_letters=2)
        )
    assert OutboxMessage.objects.count() == 2
    row = Operation.objects.get(action="replay")
    assert row.changed == 2
    assert row.ended_at


def test_metadata_of_plain_sql_that_python_cannot_write(db):
    """A number that is infinite to Python: the copy's metadata has only where it comes from."""
    if connection.vendor == "mysql" and not connection.mysql_is_mariadb:
        pytest.skip("cannot be stored on MySQL")
    got = Recorder()
    sub = Sub(handler("t", "g", got))
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO queue_outbox (topic, partition_key, id, payload, metadata) VALUES ('t', 'k', 'x', '1', %s)",
            ['{"a": 1e999}'],
        )
    sub.settle()
    (offset,) = offsets_of()
    assert operations.replay(*G, offset, offset, actor=ME).changed == 1
    sub.settle()
    assert len(got.deliveries) == 2
    assert set(QueueMessage.objects.get(target_group="g").metadata) == {"replayed_from"}
