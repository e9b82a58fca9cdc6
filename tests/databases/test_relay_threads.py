"""The threads that relay: errors, notifications, the end."""

from __future__ import annotations

import logging

import pytest

from django_mysqlqueue import publish
from django_mysqlqueue.models import OutboxMessage, RelayPosition, RelayWatermark
from django_mysqlqueue.options.backoff import Backoff
from tests.support import garbage
from tests.support.internals import Relay, Relays, relaying, relays, sequence, sessions
from tests.support.processes import wait_for

SOURCE, TARGET = "default", "queue"


@pytest.fixture
def relay(queue_db, settings, monkeypatch):
    settings.MYSQLQUEUE = {"RETENTION": 0, "TOPICS": {"t": {"DATABASE": TARGET, "VIA": SOURCE}}}
    monkeypatch.setattr(relays, "RETRY", Backoff(initial=0.01, jitter=0.0))
    monkeypatch.setattr(relays, "IDLE", 0.2)
    one = Relay(SOURCE, TARGET)
    yield one
    one.stop()
    wait_for(lambda: one._thread is None)


def arrived():
    return OutboxMessage.objects.using(TARGET).count()


def send():
    publish("t", 1)
    sequence(SOURCE)


@pytest.mark.parametrize("error", [ValueError("a bug"), MemoryError()])
def test_a_thread_survives_every_error(relay, monkeypatch, caplog, error):
    done = relaying.relay
    errors = [error, error]

    def fails(*args, **options):
        if errors:
            raise errors.pop()
        return done(*args, **options)

    monkeypatch.setattr(relaying, "relay", fails)
    send()
    relay.notify()
    assert not relay.is_idle()
    wait_for(lambda: arrived() == 1 and relay.is_idle())
    (first, *_) = [one for one in caplog.records if one.mysqlqueue["event"] == "relay.failed"]
    assert first.exc_info


def test_a_thread_ends_and_starts_again(relay):
    send()
    relay.notify()
    wait_for(lambda: arrived() == 1)
    wait_for(lambda: relay._thread is None)
    send()
    relay.notify()
    wait_for(lambda: arrived() == 2)


def test_connections_to_a_demoted_primary_are_dropped(relay, monkeypatch):
    renewed = []
    renew = sessions.renew
    monkeypatch.setattr(sessions, "renew", lambda: renewed.append(1) or renew())
    send()
    relay.notify()
    wait_for(lambda: arrived() == 1)
    assert renewed


def test_what_a_restored_target_has_lost_is_logged(relay, caplog):
    send()
    relay.notify()
    wait_for(lambda: arrived() == 1)
    wait_for(relay.is_idle)
    offset = RelayWatermark.objects.get().relayed_offset
    garbage.collect(SOURCE)
    RelayPosition.objects.using(TARGET).update(relayed_offset=0, relayed_id="")
    relay.notify()
    wait_for(lambda: any(one.mysqlqueue["event"] == "relay.lost" for one in caplog.records))
    (found,) = [one for one in caplog.records if one.mysqlqueue["event"] == "relay.lost"]
    assert found.levelno == logging.ERROR
    assert found.mysqlqueue == {
        "event": "relay.lost",
        "source": SOURCE,
        "target": TARGET,
        "topic": "t",
        "first": 1,
        "last": offset,
    }


def test_only_topics_for_a_target_notify_it(queue_db, monkeypatch):
    notified = []
    monkeypatch.setattr(Relay, "notify", lambda self: notified.append(self._target))
    some = Relays(SOURCE, ["a", "b"])
    some.found(["t", "t@c", "t@a", "u@a"])
    assert notified == ["a"]
    some.look()
    assert notified == ["a", "a", "b"]
    Relays(SOURCE).found(["t@a"])
    assert notified == ["a", "a", "b"]
