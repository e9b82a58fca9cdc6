"""``tail(follow=True)``: followers of a process share a thread and its reads, and miss nothing."""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
import time

import pytest
from django.db import OperationalError, ProgrammingError, connection

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import QueueMessage, Sequencer
from django_mysqlqueue.tails import Gap, following, tail
from tests.support import garbage
from tests.support.harness import USING, sequence
from tests.support.server_sessions import processlist
from tests.tails.conftest import POLL

WAIT = 20.0


def send(*payloads, topic="t", key="k", **options):
    publish_many(topic, (Message(payload, key=key, **options) for payload in payloads))
    sequence()


def take(follower, number):
    """The next payloads; fails when they do not come."""
    found = []
    for _ in range(number):
        assert follower.wait(WAIT), f"only {found} came"
        one = next(follower)
        found.append(one if isinstance(one, Gap) else one.payload)
    return found


def until(condition):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(POLL)


def truncate(end):
    """What a failover to a replica that lacked transactions leaves of the log."""
    QueueMessage.objects.filter(offset__gt=end).delete()
    Sequencer.objects.update(last_offset=end)


def append(offset, payload):
    content = str(payload).encode()
    QueueMessage.objects.create(
        offset=offset,
        topic="t",
        partition_key="k",
        message_id=f"i{offset}",
        payload=content,
        created_at=1,
        published_at=1,
    )


def in_the_hub():
    return threading.current_thread().name.startswith("mysqlqueue-tails-")


def collect(settings):
    settings.MYSQLQUEUE = {"RETENTION": 0, "ORPHAN_RETENTION": 0, "POLL_INTERVAL": POLL, "MAX_POLL_INTERVAL": POLL}
    garbage.collect(USING)


def test_it_begins_with_the_next_message_and_waits_for_more(db):
    send("old")
    with tail("t", follow=True) as follower:
        assert not follower.wait(0.1)
        send(1, 2)
        assert take(follower, 2) == [1, 2]
        assert not follower.wait(5 * POLL)
        send(3)
        assert take(follower, 1) == [3]
        assert follower.position == QueueMessage.objects.latest("offset").offset
    assert list(follower) == []


def test_a_message_that_is_published_after_the_call_is_not_missed(db):
    """The iteration may begin later."""
    with tail("t", follow=True) as follower:
        send(1)
        time.sleep(5 * POLL)
        assert take(follower, 1) == [1]


def test_it_begins_in_the_past_and_follows_from_there(db):
    send(*range(50))
    with tail("t", offset=0, follow=True) as follower, tail("t", since=3600, follow=True) as other:
        assert take(follower, 50) == list(range(50))
        send(50)
        assert take(follower, 1) == [50]
        assert take(other, 51) == list(range(51))


def test_it_ends_at_the_limit(db):
    send(*range(3))
    with tail("t", offset=0, follow=True, limit=5) as follower:
        send(*range(3, 9))
        assert [one.payload for one in follower] == [0, 1, 2, 3, 4]


def test_each_follower_has_its_own_topic_key_and_filter(db):
    filters = [{}, {"key": "a"}, {"where": {"n": [{"numeric": [">", 4]}]}}, {"key": "a", "where": {"n": [6]}}]
    followers = [tail("t", follow=True, **options) for options in filters]
    other = tail("other", follow=True)
    for number in range(8):
        publish("t", number, key="ab"[number % 2], metadata={"n": number})
        publish("other", -number)
    sequence()
    expected = [list(range(8)), [0, 2, 4, 6], [5, 6, 7], [6]]
    assert [take(one, len(found)) for one, found in zip(followers, expected, strict=True)] == expected
    assert take(other, 8) == [-number for number in range(8)]
    for follower in (*followers, other):
        assert not follower.wait(3 * POLL)
        follower.close()


def test_a_follower_of_a_topic_that_joins_later_misses_nothing(db):
    with tail("other", follow=True) as first:
        send("x", topic="other")
        take(first, 1)
        send(1)
        with tail("t", offset=0, follow=True) as follower:
            send(2)
            assert take(follower, 2) == [1, 2]


def test_one_that_joins_while_the_log_is_read_misses_nothing(db, monkeypatch):
    """Its topic is not among those that are read just now."""
    real, joined = following.read_topics, []

    def join_meanwhile(session, topics, *args):
        found = real(session, topics, *args)
        if not joined:
            joined.append(tail("t", offset=position + 1, follow=True))
        return found

    with tail("other", follow=True) as first:
        assert not first.wait(3 * POLL)
        position = first.position or 0
        publish("other", "x")
        publish("t", 1)
        monkeypatch.setattr(following, "read_topics", join_meanwhile)
        sequence()
        take(first, 1)
        assert take(joined[0], 1) == [1]
        joined[0].close()


def test_a_slow_follower_reads_what_the_hub_no_longer_keeps(db, monkeypatch):
    monkeypatch.setattr(following.HubLimits.__init__, "__defaults__", (following.LIMITS, 10, 8_388_608, 0.05))
    with tail("t", follow=True) as slow, tail("t", follow=True) as fast:
        for start in range(0, 100, 5):
            send(*range(start, start + 5))
            assert take(fast, 5) == list(range(start, start + 5))
        assert take(slow, 100) == list(range(100))
        send(100)
        assert take(slow, 1) == take(fast, 1) == [100]


def test_the_hub_keeps_a_bounded_size(db, monkeypatch):
    monkeypatch.setattr(following.HubLimits.__init__, "__defaults__", (following.LIMITS, 1000, 10_000, 0.05))
    with tail("t", follow=True) as follower:
        assert not follower.wait(3 * POLL)
        for number in range(10):
            send(f"{number}{'x' * 4000}")
        assert [one[0] for one in take(follower, 10)] == [str(number) for number in range(10)]
        (window,) = following.hub_of(USING)._windows.values()
        assert len(window._events) <= 3
        send("y" * 50_000)
        assert take(follower, 1) == ["y" * 50_000]
        assert len(window._events) == 1


# -- gaps ------------------------------------------------------------------------


@pytest.mark.promise("Tails")
def test_messages_that_gc_deletes_before_they_are_read_are_a_gap(db, settings, monkeypatch):
    real = following.read_topics
    begun, ready = threading.Event(), threading.Event()

    def late(*args):
        begun.set()
        assert ready.wait(WAIT)
        return real(*args)

    with tail("t", follow=True) as follower:
        assert not follower.wait(3 * POLL)
        before = follower.position
        monkeypatch.setattr(following, "read_topics", late)
        send(1, 2)
        assert begun.wait(WAIT)
        last = QueueMessage.objects.latest("offset").offset
        collect(settings)
        send(3)
        ready.set()
        assert take(follower, 2) == [Gap("t", before, last), 3]
        send(4)
        assert take(follower, 1) == [4], "the gap comes once"


@pytest.mark.promise("Tails")
def test_one_that_begins_before_what_gc_has_deleted_gets_one_gap(db, settings):
    send(1, 2)
    last = QueueMessage.objects.latest("offset").offset
    collect(settings)
    with tail("t", offset=1, follow=True) as follower:
        assert take(follower, 1) == [Gap("t", 0, last)]
        send(3)
        assert take(follower, 1) == [3]


@pytest.mark.promise("Tails")
def test_a_log_that_has_lost_its_end_is_followed_from_its_new_end(db, caplog):
    """As after a failover to a replica that lacked some transactions: offsets are assigned again."""
    caplog.set_level("INFO", "django_mysqlqueue.subscriber")
    send(1, 2, 3)
    with tail("t", offset=0, follow=True) as follower:
        assert take(follower, 3) == [1, 2, 3]
        first, *_, last = QueueMessage.objects.order_by("offset").values_list("offset", flat=True)
        truncate(first)
        deadline = time.monotonic() + WAIT
        while follower._follower.position > first:
            assert time.monotonic() < deadline
            time.sleep(POLL)
        append(first + 1, 9)
        assert first + 1 <= last
        assert take(follower, 2) == [Gap("t", first, last, truncated=True), 9]
    assert [one.mysqlqueue for one in caplog.records] == [{"event": "log.truncated", "tail": last}]


def test_one_that_is_ahead_of_the_hub_gets_what_a_log_that_went_back_has_there(db, monkeypatch):
    """The log goes back to a place that the hub has not yet read, and the new follower has."""
    real, stops, stopped, goes_on = following.log.end_of_log, threading.Event(), threading.Event(), threading.Event()

    def end_of_log(session):
        if stops.is_set() and in_the_hub():
            stops.clear()
            stopped.set()
            assert goes_on.wait(WAIT)
            raise OperationalError(2013, "Lost") if connection.vendor == "mysql" else OperationalError("locked")
        return real(session)

    monkeypatch.setattr(following.log, "end_of_log", end_of_log)
    send(1)
    with tail("t", follow=True) as first:
        assert not first.wait(3 * POLL)
        stops.set()
        assert stopped.wait(WAIT)
        send(2, 3, 4)
        begin, last = first.position, QueueMessage.objects.latest("offset").offset
        with tail("t", offset=last + 1, follow=True) as second:
            truncate(begin + 1)
            goes_on.set()
            assert take(first, 1) == [2]
            append(begin + 2, 9)
            assert take(second, 2) == [Gap("t", begin + 1, last, truncated=True), 9]
            assert take(first, 1) == [9]


@pytest.mark.promise("Tails")
@pytest.mark.parametrize("follow", [True, False])
def test_one_that_is_opened_beyond_the_end_says_so_and_misses_nothing(db, caplog, follow):
    """A client continues with a log that went back while the client was away."""
    send(*range(10))
    offsets = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    truncate(offsets[4])
    gap = Gap("t", offsets[4], offsets[-1], truncated=True)
    with tail("t", offset=offsets[-1] + 1, follow=follow) as reader:
        assert take(reader, 1) == [gap]
        assert reader.position == offsets[4]
        for number, offset in enumerate(range(offsets[4] + 1, offsets[4] + 16)):
            append(offset, number)
        if follow:
            assert take(reader, 15) == list(range(15))
    assert [one.mysqlqueue for one in caplog.records] == [{"event": "log.truncated", "tail": offsets[-1]}]


def test_what_is_below_the_end_of_all_topics_is_not_beyond_the_end(db, settings, caplog):
    """Offsets are those of all topics, and the end of an empty log stays where it was."""
    send(1, topic="t")
    send(2, 3, topic="other")
    end = QueueMessage.objects.latest("offset").offset
    collect(settings)
    assert not QueueMessage.objects.exists()
    with tail("t", offset=end + 1, follow=True) as follower:
        send(4)
        assert take(follower, 1) == [4]
    assert not caplog.records


# -- cost ------------------------------------------------------------------------


@pytest.mark.promise("Tails")
def test_a_hundred_followers_ask_the_database_as_often_as_one(db, hubs):
    def statements_while_quiet(follower):
        began = time.monotonic()
        hubs.sent.clear()
        assert not follower.wait(10 * POLL)
        sent = len(hubs.sent)
        return sent * 10 * POLL / (time.monotonic() - began)

    def cost(number):
        followers = [tail("t", follow=True) for _ in range(number)]
        until(lambda: hubs.sent)
        quiet, deadline = statements_while_quiet(followers[0]), time.monotonic() + WAIT
        while quiet < 5 and time.monotonic() < deadline:  # the hub stood still: half its polls are missing
            quiet = max(quiet, statements_while_quiet(followers[0]))
        for one in range(10):
            send(one)
            for follower in followers:
                assert take(follower, 1) == [one]
        reads = sum("payload" in sql for sql in hubs.sent)
        for follower in followers:
            follower.close()
        threads = [one for one in threading.enumerate() if one.name.startswith("mysqlqueue-tails-")]
        assert len(threads) == 1
        threads[0].join(WAIT)
        hubs.sent.clear()
        return quiet, reads

    send(0)
    one, hundred = cost(1), cost(100)
    assert one[1] == hundred[1] == 10, "contents are read once"
    # Polls by the clock; on a slow machine fewer of them.
    assert 0 < hundred[0] <= 2 * one[0] + 2


def test_an_idle_hub_sends_one_small_statement_a_poll(db, hubs):
    with tail("t", follow=True) as follower:
        assert not follower.wait(5 * POLL)
        until(lambda: hubs.sent)
        hubs.sent.clear()
        assert not follower.wait(10 * POLL)
        until(lambda: len(hubs.sent) > 2)
        assert len(set(hubs.sent)) == 1
        assert "MAX(m.`offset`)" in hubs.sent[0]


def test_the_thread_ends_some_time_after_the_last_follower(db):
    hub = following.hub_of(USING)
    limits = hub._limits
    hub._limits = dataclasses.replace(limits, linger=60)
    with tail("t", follow=True):
        first = hub._thread
    with tail("t", follow=True):
        assert hub._thread is first, "a page that is loaded again needs no new one"
        hub._limits = limits
    first.join(WAIT)
    assert hub._thread is None
    with tail("t", follow=True) as follower:
        send(1)
        assert take(follower, 1) == [1]


def test_one_that_was_forgotten_is_closed(db):
    hub = following.hub_of(USING)
    follower = tail("t", follow=True)
    assert hub._windows
    del follower
    gc.collect()
    until(lambda: not hub._windows)


# -- faults ----------------------------------------------------------------------


def test_an_error_that_will_not_pass_is_raised_where_messages_are_read(db, monkeypatch):
    def fail(*args):
        raise ProgrammingError("no such table")

    followers = [tail("t", follow=True), tail("other", follow=True)]
    with monkeypatch.context() as patch:
        patch.setattr(following, "read_topics", fail)
        send(1)
        for follower in followers:
            with pytest.raises(ProgrammingError, match="no such table"):
                next(follower)
    for follower in followers:
        follower.close()
    with tail("t", offset=0, follow=True) as follower:
        assert take(follower, 1) == [1], "others are not affected"


@pytest.mark.servers_only
@pytest.mark.parametrize("code", [1045, 1064, 1142, 1146])
def test_a_refusal_of_the_server_is_raised_where_messages_are_read(db, monkeypatch, code):
    def fail(*args):
        raise OperationalError(code, "no")

    with tail("t", follow=True) as one, tail("other", follow=True) as other:
        monkeypatch.setattr(following, "read_topics", fail)
        send(1)
        for follower in (one, other):
            with pytest.raises(OperationalError, match="no"):
                next(follower)


SLOW = (
    "SELECT COUNT(*) FROM information_schema.columns a, information_schema.columns b, information_schema.columns c, "
    "information_schema.columns d"
)


class Interrupted:
    """Makes the hub's statements of one function run for long, until somebody or a time limit ends them."""

    def __init__(self, monkeypatch, module, name, how):
        self.how, self.left, self.codes = how, 0, []
        real = getattr(module, name)

        def slow(session, *args):
            if self.left and in_the_hub():
                self.left -= 1
                self.run(session)
            return real(session, *args)

        monkeypatch.setattr(module, name, slow)

    def run(self, session):
        timer = None
        if self.how == "killed":
            session.connection.ensure_connection()
            thread_id = session.connection.connection.thread_id()
            timer = threading.Thread(target=kill_query, args=[thread_id])
            timer.start()
        elif session.dialect.name == "mariadb":
            session.execute("SET SESSION max_statement_time = 0.1")
        else:
            session.execute("SET SESSION max_execution_time = 100")
        try:
            session.execute(SLOW)
        except OperationalError as error:
            self.codes.append(error.args[0])
            raise
        finally:
            if timer is not None:
                timer.join()


def kill_query(thread_id):
    """Kill what a session runs, as soon as that is the slow statement."""

    def is_slow():
        cursor.execute(f"SELECT info FROM {processlist()} WHERE id = %s", [thread_id])
        return any(info and info.startswith(SLOW[:30]) for (info,) in cursor.fetchall())

    with connection.cursor() as cursor:
        until(is_slow)
        cursor.execute(f"KILL QUERY {thread_id}")
    connection.close()


@pytest.mark.servers_only
@pytest.mark.promise("Tails")
@pytest.mark.parametrize("how", ["killed", "limited"])
@pytest.mark.parametrize(
    ("module", "name"), [(following.log, "end_of_log"), (following, "read_topics"), (following, "read_topic")]
)
def test_an_interrupted_statement_ends_no_follower(db, monkeypatch, caplog, module, name, how):
    """Each continues from its own place: at the end, in the past, of another topic."""
    caplog.set_level("INFO", "django_mysqlqueue.subscriber")
    interrupted = Interrupted(monkeypatch, module, name, how)
    send(*range(5))
    send(*range(5), topic="other")
    with tail("t", follow=True) as one, tail("other", follow=True) as other:
        send(5)
        send(5, topic="other")
        assert take(one, 1) == take(other, 1) == [5]
        interrupted.left = 2
        with tail("t", offset=0, follow=True) as late:
            send(6)
            send(6, topic="other")
            assert take(late, 7) == list(range(7))
            assert take(one, 1) == take(other, 1) == [6]
            until(lambda: caplog.records[-1].mysqlqueue["event"] == "tails.recovered")
    assert len(interrupted.codes) == 2
    assert set(interrupted.codes) <= {1317, 1969, 3024}
    assert caplog.records[0].mysqlqueue["event"] == "tails.failed"


def test_a_bug_in_the_thread_does_not_leave_followers_waiting(db, monkeypatch):
    def fail(*args):
        raise ZeroDivisionError

    with tail("t", follow=True) as follower:
        monkeypatch.setattr(following, "read_topics", fail)
        send(1)
        with pytest.raises(ZeroDivisionError):
            next(follower)


def test_an_outage_delays_followers_and_is_logged(db, monkeypatch, caplog):
    real, failures = following.log.end_of_log, iter([True, True, True])

    def fail(session):
        if next(failures, False):
            raise (
                OperationalError(2013, "Lost connection")
                if connection.vendor != "sqlite"
                else OperationalError("database is locked")
            )
        return real(session)

    caplog.set_level("INFO", "django_mysqlqueue.subscriber")
    with tail("t", follow=True) as follower:
        assert not follower.wait(3 * POLL)
        monkeypatch.setattr(following.log, "end_of_log", fail)
        send(1)
        assert take(follower, 1) == [1]
        send(2)
        assert take(follower, 1) == [2]
    events = [record.mysqlqueue for record in caplog.records]
    assert [(one["event"], one["failures"]) for one in events] == [
        ("tails.failed", 1),
        ("tails.failed", 2),
        ("tails.recovered", 3),
    ]


def test_a_child_of_a_fork_has_hubs_of_its_own(db):
    """The hub's thread is not in the child, which must neither wait for it nor for its lock."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite's connections must not be carried across a fork")
    with tail("t", follow=True) as follower:
        send(1)
        assert take(follower, 1) == [1]
        read, write = os.pipe()
        with following.hub_of(USING)._changed:
            child = os.fork()
        if not child:
            found = b"hangs"
            try:
                next(follower)
            except RuntimeError as error:
                found = str(error).encode()
            os.write(write, found if not following._hubs else b"hubs")
            os._exit(0)
        assert os.read(read, 100) == b"The process has forked. Call tail() again in the child."
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
        send(2)
        assert take(follower, 1) == [2], "the parent's hub is not affected"


def test_readers_of_the_past_do_not_delay_those_of_the_end(db, monkeypatch):
    """Between two of their pages, the hub polls."""
    real, slow = following.read_topic, []
    is_sent, has_come = threading.Event(), threading.Event()

    def read(*args):
        slow.append(True)
        # The first page lasts until there is a message, the third until it has come.
        time.sleep(2 * POLL)
        assert len(slow) == 2 or (is_sent if len(slow) == 1 else has_come).wait(2 * WAIT)
        return real(*args)

    send(*range(10))
    monkeypatch.setattr(following, "read_topic", read)
    with tail("u", follow=True) as live:
        assert not live.wait(3 * POLL)
        readers = [tail("t", offset=0, follow=True) for _ in range(10)]
        for reader in readers:
            assert not reader._take()
        until(lambda: slow)
        send("now", topic="u")
        is_sent.set()
        assert take(live, 1) == ["now"]
        has_come.set()
        for reader in readers:
            assert take(reader, 10) == list(range(10))
            reader.close()


def test_a_page_that_fails_does_not_stop_the_others(db, monkeypatch):
    real = following.read_topic

    def read(session, topic, *args):
        if topic == "t":
            raise OperationalError(2013, "Lost") if connection.vendor == "mysql" else OperationalError("locked")
        return real(session, topic, *args)

    monkeypatch.setattr(following, "RETRY", following.Backoff(initial=0.01, maximum=0.02))
    monkeypatch.setattr(following, "read_topic", read)
    send(1)
    send(2, topic="u")
    with tail("t", offset=0, follow=True) as stuck, tail("u", offset=0, follow=True) as other:
        assert not stuck.wait(5 * POLL)
        assert take(other, 1) == [2]


def test_waiting_for_a_tail_that_does_not_follow_reads_it(db):
    send(1)
    reader = tail("t", offset=0)
    assert reader.wait(0)
    assert next(reader).payload == 1
    assert not reader.wait(None)


def test_another_thread_closes_it(db):
    follower = tail("t", follow=True)
    threading.Timer(0.05, follower.close).start()
    assert list(follower) == []
    assert not follower.wait(1)
