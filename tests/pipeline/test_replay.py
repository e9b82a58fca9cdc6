"""Archived messages come back: once, in order, and to whom they are for."""

from __future__ import annotations

import csv
import datetime
import json
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import ConsumerGroup, OutboxMessage, QueueMessage
from pyspark_mysqlqueue import replay
from pyspark_mysqlqueue.archive import run
from pyspark_mysqlqueue.archive.root import Root
from pyspark_mysqlqueue.archive.run import Job
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.replay import CAME_FROM, Replay
from tests.support.factories import QueueMessageFactory
from tests.support.handlers import Recorder
from tests.support.harness import Sub, handler, sequence


@pytest.fixture
def job(spark: Any, place: Any, tmp_path: Any) -> Job:
    return Job(spark, place, Root(str(tmp_path / "archive")))


def archived(job: Job, count: int = 12) -> list[QueueMessage]:
    publish_many("t", (Message({"n": n}, key=f"k{n % 3}", metadata={"n": n}) for n in range(count)))
    publish("other", 1)
    sequence()
    run.grow(job)
    found = list(QueueMessage.objects.filter(topic="t").order_by("offset"))
    QueueMessage.objects.all().delete()
    return found


def test_into_another_topic(job):
    before = archived(job)
    assert replay.play(job, Replay("t", to="again")) == 12
    got = Recorder()
    Sub(handler(topic="again", function=got)).settle()
    for key in range(3):
        assert [body["n"] for body in got.payloads if body["n"] % 3 == key] == list(range(key, 12, 3))
    after = {row.metadata[CAME_FROM]["offset"]: row for row in QueueMessage.objects.all()}
    for row in before:
        copy = after[row.offset]
        assert (bytes(copy.payload), copy.partition_key) == (bytes(row.payload), row.partition_key)
        origin = copy.metadata.pop(CAME_FROM)
        assert copy.metadata == row.metadata
        assert origin == {
            "run": Replay("t", to="again").name,
            "topic": "t",
            "offset": row.offset,
            "id": row.message_id,
            "published_at": row.published_at,
        }


def test_run_again_it_adds_nothing(job):
    archived(job)
    for _ in range(2):
        replay.play(job, Replay("t", to="again"))
        sequence()
    assert QueueMessage.objects.count() == 12
    replay.play(job, Replay("t", to="again", run="second"))
    sequence()
    assert QueueMessage.objects.count() == 24


@pytest.mark.promise("Spark writes")
def test_one_that_died_is_finished_by_another(job, monkeypatch):
    archived(job)
    monkeypatch.setattr(replay, "SLICE_OFFSETS", 5)
    calls = []

    def dies(offsets: int) -> None:
        calls.append(offsets)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay.play(job, Replay("t", to="again"), progress=dies)
    sequence()
    assert QueueMessage.objects.count() == 5
    replay.play(job, Replay("t", to="again"))
    sequence()
    assert QueueMessage.objects.count() == 12


def test_for_one_group_alone(job):
    wanted, other = Recorder(), Recorder()
    subs = [Sub(handler(group="wanted", function=wanted)), Sub(handler(group="other", function=other))]
    archived(job)
    for sub in subs:
        sub.settle()
    wanted.payloads.clear()
    other.payloads.clear()
    replay.play(job, Replay("t", group="wanted"))
    sequence()
    for sub in subs:
        sub.settle()
    assert sorted(body["n"] for body in wanted.payloads) == list(range(12))
    assert other.payloads == []


def test_copies_for_one_group_are_not_replayed_in_their_turn(job):
    """They stand in the topic of their originals, and in the archive once it has come that far."""
    Sub(handler(group="g"))
    archived(job, 4)
    for name in ("", "", "second"):
        assert replay.play(job, Replay("t", group="g", run=name)) == 4
        sequence()
        run.grow(job)
    assert QueueMessage.objects.filter(topic="t").count() == 8
    assert replay.plan(job, Replay("t", to="again")).rows == 4
    replay.play(job, Replay("t", to="again"))
    sequence()
    run.grow(job)
    assert replay.plan(job, Replay("again", to="third")).rows == 4


@pytest.mark.any_engine
def test_what_is_chosen(job):
    rows = archived(job)
    middle = Replay("t", since=rows[3].offset, until=rows[9].offset, where="partition_key = 'k0'", to="again")
    assert replay.plan(job, middle).rows == 2
    moment = datetime.datetime.fromtimestamp(rows[0].published_at / 1000, datetime.UTC)
    later = moment + datetime.timedelta(hours=1)
    assert replay.plan(job, Replay("t", since=moment, until=later, to="again")).rows == 12
    assert replay.plan(job, Replay("t", since=later, to="again")).rows == 0
    assert replay.play(job, middle) == 2


@pytest.mark.any_engine
def test_a_rate_is_kept(job, monkeypatch):
    archived(job)
    slept = []
    monkeypatch.setattr(replay, "time", SimpleNamespace(sleep=slept.append, monotonic=lambda: 0.0))
    monkeypatch.setattr(replay, "SLICE_SECONDS", 1)
    assert replay.play(job, Replay("t", to="again", rate=6)) == 12
    assert slept == [1.0, 2.0]


def test_metadata_of_any_form(job):
    forms = [{}, {"a": "}"}, {CAME_FROM: "before"}, {"nested": {"a": [1, "{"]}}]
    for metadata in forms:
        QueueMessageFactory(metadata=metadata)
    run.grow(job)
    replay.play(job, Replay("t", to="again"))
    sequence()
    copies = [row.metadata for row in QueueMessage.objects.filter(topic="again").order_by("offset")]
    assert all(isinstance(one.pop(CAME_FROM), dict) for one in copies)
    assert copies == [{}, {"a": "}"}, {}, {"nested": {"a": [1, "{"]}}]


def test_white_space_around_metadata(job):
    """MariaDB and SQLite keep it."""
    forms = ['\n{"a": 1}\r\n', ' \t{"a": 1, "b": "} "}\n', "{\n}\t"]
    for text in forms:
        row = QueueMessageFactory()
        with connection.cursor() as cursor:
            cursor.execute("UPDATE queue_messages SET metadata = %s WHERE `offset` = %s", (text, row.offset))
    run.grow(job)
    replay.play(job, Replay("t", to="again"))
    sequence()
    copies = [row.metadata for row in QueueMessage.objects.filter(topic="again")]
    copies.sort(key=lambda metadata: metadata.pop(CAME_FROM)["offset"])
    assert copies == [{"a": 1}, {"a": 1, "b": "} "}, {}]


@pytest.mark.promise("Spark writes")
def test_what_was_for_one_group_goes_to_nobody_else(job):
    """And what is a repeat, to nobody: its original is replayed."""
    ConsumerGroup.objects.create(consumer_group="g", topic="t")
    plain = QueueMessageFactory()
    for_g = QueueMessageFactory(target_group="g")
    QueueMessageFactory(target_group="h")
    QueueMessageFactory(target_group="g", original_id="m1", original_topic="t", original_offset=plain.offset)
    run.grow(job)
    for options, offsets in (({"to": "again"}, [plain]), ({"group": "g"}, [plain, for_g])):
        OutboxMessage.objects.all().delete()
        assert replay.play(job, Replay("t", **options)) == len(offsets)
        found = OutboxMessage.objects.values_list("metadata", flat=True)
        assert sorted(one[CAME_FROM]["offset"] for one in found) == [row.offset for row in offsets]


@pytest.mark.any_engine
def test_a_sparse_topic_keeps_up_with_its_rate(job, monkeypatch):
    """Slices are of messages, not of the offsets between them."""
    for number in range(60):
        QueueMessageFactory(topic="t" if number % 10 == 0 else "other")
    run.grow(job)
    slices, write = [], replay._write
    monkeypatch.setattr(replay, "_write", lambda *args: slices.append(write(*args)) or slices[-1])
    monkeypatch.setattr(replay, "SLICE_SECONDS", 1)
    assert replay.play(job, Replay("t", to="again", rate=4)) == 6
    assert slices == [4, 2]


def test_hashed_partitions_stay(job, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": 3}}}
    before = {row.offset: row for row in archived(job)}
    replay.play(job, Replay("t", to="again"))
    got: list[tuple[Any, Any]] = []
    Sub(handler(topic="again", function=lambda one: got.append((one.key, one.payload["n"])))).settle()
    assert sorted(got, key=lambda one: one[1]) == [(f"k{n % 3}", n) for n in range(12)]
    for row in QueueMessage.objects.filter(topic="again"):
        original = before[row.metadata[CAME_FROM]["offset"]]
        assert (row.partition_key, row.publisher_key) == (original.partition_key, original.publisher_key)
        assert row.partition_key.startswith("__p:")
        assert row.publisher_key


@pytest.mark.promise("Expiry")
@pytest.mark.parametrize("partitions", [None, 3])
@pytest.mark.parametrize("target", [{"to": "again"}, {"group": "g"}])
def test_copies_do_not_expire_and_supersede_nothing(job, settings, partitions, target):
    of_topic = {"PARTITIONS": partitions} if partitions else {}
    settings.MYSQLQUEUE = {"TOPICS": {"t": of_topic, "again": of_topic}}
    got = []
    sub = Sub(handler(topic=target.get("to", "t"), group="g", function=lambda one: got.append(one.payload)))
    publish_many("t", [Message(n, key="k", expires_in=0.001, coalesce="c") for n in range(4)])
    sequence()
    run.grow(job)
    QueueMessage.objects.all().delete()
    assert replay.play(job, Replay("t", **target)) == 4
    assert set(OutboxMessage.objects.values_list("expires_at", "coalesce_key")) == {(None, None)}
    sequence()
    sub.settle()
    assert got == [0, 1, 2, 3]


@pytest.mark.promise("Priority")
@pytest.mark.parametrize("partitions", [None, 3])
@pytest.mark.parametrize("target", [{"to": "again"}, {"group": "g"}])
def test_priorities_stay(job, settings, partitions, target):
    """In the outbox, copies are ordered as messages that are published: by priority, then as the originals."""
    of_topic = {"PARTITIONS": partitions} if partitions else {}
    settings.MYSQLQUEUE = {"TOPICS": {"t": of_topic}}
    got = []
    topic = target.get("to", "t")
    one = handler(topic=topic, group="g", function=lambda one: got.append((one.priority, one.key, one.payload)))
    sub = Sub(one, priority_share=0)
    numbers = range(24)
    publish_many("t", [Message(n, key=f"k{n % 2}", priority=(0, 10, -10)[n % 3]) for n in numbers])
    sequence()
    run.grow(job)
    before = {row.offset: row.partition_key for row in QueueMessage.objects.all()}
    QueueMessage.objects.all().delete()
    assert replay.play(job, Replay("t", **target)) == 24
    for row in OutboxMessage.objects.all():
        assert row.partition_key == before[row.metadata[CAME_FROM]["offset"]]
        assert row.deliver_at == 0
    sequence()
    sub.settle()
    assert [priority for priority, _, _ in got] == [10] * 8 + [0] * 8 + [-10] * 8
    assert sorted(n for _, _, n in got) == list(numbers)
    for priority, key, n in got:
        assert (priority, key) == ((0, 10, -10)[n % 3], f"k{n % 2}")
    for lane in {one[:2] for one in got}:
        handled = [n for *of, n in got if tuple(of) == lane]
        assert handled == sorted(handled)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "either --to .* or --group"),
        ({"to": "again", "group": "g"}, "either --to .* or --group"),
        ({"to": "t"}, "reach every group"),
        ({"to": "a/b"}, "a/b"),
        ({"group": "a/b"}, "a/b"),
        ({"to": "again", "run": "a b"}, "'a b'"),
        ({"to": "again", "rate": 0}, "rate 0"),
        ({"to": "again", "rate": float("nan")}, "rate nan"),
        ({"to": "again", "since": "latest"}, "latest"),
        ({"to": "again", "until": "earliest"}, "earliest"),
    ],
)
def test_a_bad_replay_is_named(options, says):
    with pytest.raises(PipelineError, match=says):
        Replay("t", **options)


@pytest.mark.any_engine
def test_a_condition_that_is_none_is_named(job):
    archived(job)
    for where in ("nothing = 1", "offset ="):
        with pytest.raises(PipelineError, match=f"--where '{where}'"):
            replay.plan(job, Replay("t", to="again", where=where))


def test_a_group_that_nobody_knows_is_an_error(job):
    archived(job)
    with pytest.raises(PipelineError, match="'nobody' is not registered"):
        replay.plan(job, Replay("t", group="nobody"))


# -- the commands -------------------------------------------------------------


@pytest.mark.any_engine
def test_the_commands(job, capsys, settings):
    settings.MYSQLQUEUE = {"ARCHIVE_PATH": job.root.uri}
    publish_many("t", range(5))
    sequence()
    call_command("queuearchive")
    assert "Archived 5 messages in 1 commit, " in capsys.readouterr().out
    call_command("queuearchive", "verify")
    assert "No faults in 1 file with 5 messages." in capsys.readouterr().out
    call_command("queuearchive", "status", format="json")
    status = json.loads(capsys.readouterr().out)
    assert (status["rows"], status["archived"]) == (5, status["log"])
    call_command("queuearchive", "compact")
    call_command("queuearchive", "expire", before=datetime.date(2000, 1, 1))
    call_command("queuearchive", "vacuum", "--keep", "0")
    capsys.readouterr()
    call_command("queuereplay", topic="t", to="again", dry_run=True)
    said = capsys.readouterr().out
    assert "5 messages of topic t" in said
    assert "topic again, which has no consumer group yet" in said
    assert not OutboxMessage.objects.exists()
    call_command("queuereplay", topic="t", to="again", interactive=False, format="json")
    assert json.loads(capsys.readouterr().out)["replayed"] == 5
    assert OutboxMessage.objects.filter(topic="again").count() == 5


@pytest.mark.any_engine
def test_an_unknown_topic_and_a_replay_of_nothing_are_errors(job, settings, capsys):
    settings.MYSQLQUEUE = {"ARCHIVE_PATH": job.root.uri}
    archived(job)
    for options in ({"to": "again"}, {"group": "g"}, {"to": "again", "dry_run": True}):
        with pytest.raises(
            CommandError, match=r"topic 'tt': the archive has no message of this topic \(it has other, t\)"
        ):
            call_command("queuereplay", topic="tt", interactive=False, **options)
    nothing = {"topic": "t", "to": "again", "where": "size < 0", "interactive": False}
    with pytest.raises(CommandError, match="nothing was changed: no archived message of topic t matches"):
        call_command("queuereplay", **nothing)
    capsys.readouterr()
    with pytest.raises(CommandError, match="nothing was changed"):
        call_command("queuereplay", format="json", **nothing)
    assert json.loads(capsys.readouterr().out)["replayed"] == 0
    call_command("queuereplay", dry_run=True, **nothing)
    assert not OutboxMessage.objects.exists()


@pytest.mark.any_engine
def test_a_no_does_nothing(job, monkeypatch, settings):
    settings.MYSQLQUEUE = {"ARCHIVE_PATH": job.root.uri}
    archived(job)
    monkeypatch.setattr("builtins.input", lambda text: "n")
    with pytest.raises(CommandError, match="replay cancelled: nothing was changed"):
        call_command("queuereplay", topic="t", to="again")
    assert not OutboxMessage.objects.exists()


@pytest.mark.any_engine
def test_a_damaged_archive_is_an_error_of_the_command(job, settings):
    from pathlib import Path

    settings.MYSQLQUEUE = {"ARCHIVE_PATH": job.root.uri}
    archived(job)
    next(Path(job.root.uri).glob("day=*/*.parquet")).unlink()
    with pytest.raises(CommandError, match=r"the archive has 1 fault$"):
        call_command("queuearchive", "verify")


def test_a_command_without_a_path_says_so(db):
    with pytest.raises(CommandError, match="ARCHIVE_PATH"):
        call_command("queuearchive")


@pytest.mark.any_engine
def test_without_django(job, capsys, tmp_path):
    from pyspark_mysqlqueue.cli import main

    publish_many("t", range(3))
    sequence()
    assert main(["archive", "--path", job.root.uri]) == 0
    assert "3 messages" in capsys.readouterr().out
    assert main(["report", "--path", job.root.uri, "--out", str(tmp_path / "report")]) == 0
    assert str(tmp_path / "report" / "report.html") in capsys.readouterr().out
    with (tmp_path / "report" / "tables" / "topics.csv").open(newline="") as file:
        assert [(row["topic"], row["messages"]) for row in csv.DictReader(file)] == [("t", "3")]
    assert main(["archive", "expire", "--path", job.root.uri]) == 1
    assert "--before" in capsys.readouterr().err
