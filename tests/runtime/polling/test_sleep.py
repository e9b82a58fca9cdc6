"""How long the poller sleeps."""

from __future__ import annotations

import itertools
import time

import pytest
from django.db import OperationalError

from django_mysqlqueue import publish
from tests.support.handlers import Recorder
from tests.support.harness import Sub, handler
from tests.support.internals import settling
from tests.support.still_time import Time


def test_nothing_spins_around_a_scheduled_message(db, monkeypatch):
    still = Time(monkeypatch)
    publish("t", "later", delay=1.0)
    got = Recorder()
    sub = Sub(handler(function=got))
    sub.step()
    still.pass_in_sleeps_of(sub)
    sub.poller.maintenance.next_at = float("inf")
    steps = 0
    ends_at = time.monotonic() + 2.5

    def stop():
        nonlocal steps
        steps += 1
        sub.work()
        return bool(got.deliveries) or time.monotonic() > ends_at

    began = time.monotonic()
    sub.poller.run(stop)
    assert got.payloads == ["later"]
    assert time.monotonic() - began < 1.5
    assert steps < 100


def test_extensions_are_part_of_the_sleep(db, monkeypatch):
    """A visibility time-out as short as the poll interval is kept all the same."""
    still = Time(monkeypatch)
    publish("t", 1, key="k")
    sub = Sub(handler(mode="shared", visibility_timeout=1.0))
    sub.step()
    assert sub.take() is not None
    still.pass_in_sleeps_of(sub)
    sub.poller.maintenance.next_at = float("inf")
    times = [time.monotonic()]
    real = settling.extend_all

    def extend(*args, **options):
        times.append(time.monotonic())
        return real(*args, **options)

    monkeypatch.setattr(settling, "extend_all", extend)
    ends_at = time.monotonic() + 2
    sub.poller.run(lambda: time.monotonic() > ends_at)
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 0.8
    assert sub.take() is None


def test_a_failed_extension_is_tried_again_at_once(db, monkeypatch):
    publish("t", 1)
    sub = Sub(handler(mode="shared"))
    sub.step()
    work = sub.poller.shared[0]
    work.mode._extend_at = 0.0

    def fail(*args, **options):
        raise OperationalError(2006, "gone")

    monkeypatch.setattr(settling, "extend_all", fail)
    with pytest.raises(OperationalError):
        work.turn()
    assert work.mode._extend_at == 0.0
