"""Outages, staged: what the dashboard says in one sentence, and what it looks like.

With ``SCREENSHOTS`` in the environment, each is photographed into that folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connections
from playwright.sync_api import Page, expect

from django_mysqlqueue import Message, publish_many, subscriber
from django_mysqlqueue.admin.pages import base
from django_mysqlqueue.inspection import Bounds
from django_mysqlqueue.inspection.bounds import StallTimes
from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.options.backoff import Backoff
from tests.browser.conftest import Desk
from tests.browser.looks import faults
from tests.conftest import Clock
from tests.support.harness import Sub, handler, sequence

WAITS = Backoff(initial=36_000, jitter=0)
Shown = Callable[..., Page]


@pytest.fixture
def shown(desk: Desk, settings: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Opens a page; the state and the sentence of its banner must be these."""
    # Time is moved by the clock here, so the times are those of production.
    monkeypatch.setattr(base.Page, "stall_times", StallTimes())
    settings.MYSQLQUEUE = {}

    def open_page(state: str, sentence: str, next_step: str, address: str = "") -> Page:
        page = desk.open(address)
        banner = page.locator(".mq-banner")
        expect(banner.locator("h2")).to_have_text(state)
        expect(banner.locator("p").first).to_have_text(re.compile(sentence))
        if next_step:
            expect(banner.locator("p").last).to_contain_text(next_step)
        assert page.title().startswith(f"{state} · ")
        icon = page.locator("#mq-icon").get_attribute("href") or ""
        assert icon.endswith(f"{state.lower()}.svg")
        if folder := os.environ.get("SCREENSHOTS"):
            name = request.node.name.removeprefix("test_").replace("_", "-")
            page.screenshot(path=Path(folder) / f"outage-{name}.png", full_page=True)
        assert faults(page) == []
        return page

    return open_page


def busy(*, clock: Clock) -> Sub:
    """Two groups that work, so that not everything is wrong."""
    sub = Sub(handler("orders", "search"), handler("orders", "mail"))
    publish_many("orders", [Message(n, key=f"customer-{n % 40:03}") for n in range(120)])
    sub.settle()
    sub.poller.write_rollups()
    return sub


def no_route(delivery: Any) -> None:
    raise ConnectionError(f"payments.example:443 refused order {delivery.payload}")


def test_all_is_well(shown: Shown, clock: Clock) -> None:
    busy(clock=clock)
    shown("OK", r"^2 consumer groups, backlog 0\. No problems found\.$", "")


def test_database_gone(shown: Shown, desk: Desk, settings: Any) -> None:
    """Nothing listens on its port."""
    gone = {**connections["default"].settings_dict, "ENGINE": "django.db.backends.mysql", "NAME": "shop"}
    gone |= {"HOST": "127.0.0.1", "PORT": "1", "OPTIONS": {"connect_timeout": 2}, "TEST": dict(gone["TEST"])}
    connections.databases["gone"] = gone
    settings.MYSQLQUEUE = {"DATABASE": "gone"}
    try:
        shown("Stopped", r"^The database 'gone' does not answer: ", "Check the database server")
    finally:
        del connections.databases["gone"]
    assert all("503" in one for one in desk.complaints)
    desk.complaints.clear()


def test_all_subscribers_dead(shown: Shown, clock: Clock) -> None:
    sub = busy(clock=clock)
    publish_many("orders", [Message(n, key=f"customer-{n % 40:03}") for n in range(300)])
    sequence()
    sub.step()
    clock.advance(720)
    page = shown(
        "Stopped", r"^No subscriber is running; 600 messages are waiting, the oldest for 12 min", "runsubscriber"
    )
    expect(page.locator("ul.mq-problems > li")).to_have_count(1)
    page.get_by_text("4 symptoms").click()
    expect(page.get_by_text("is lost: no heartbeat").first).to_be_visible()


def test_poison_messages_in_25_partitions(shown: Shown, clock: Clock, no_handlers: None) -> None:
    subscriber("orders", group="billing", on_failure="block")(no_route)
    good = busy(clock=clock)
    bad = Sub(
        handler("orders", "billing", no_route, backoff=WAITS, max_attempts=None, on_failure="block", start="latest")
    )
    publish_many("orders", [Message(n, key=f"customer-{n % 25:03}") for n in range(75)])
    for sub in (good, bad):
        sub.settle()
        sub.poller.write_rollups()
    clock.advance(120)
    good.heart.beat()
    bad.heart.beat()
    page = shown(
        "Degraded",
        r"^billing/orders: every attempt has failed since .+ \(25 of 25\): ConnectionError\.$",
        "Pause the group",
    )
    expect(page.locator("ul.mq-problems > li")).to_have_count(1)
    expect(page.get_by_text("ConnectionError: payments.example:443 refused order")).to_have_count(1)


def test_limited_group(shown: Shown, clock: Clock) -> None:
    good = busy(clock=clock)
    slow = Sub(handler("orders", "sms", rate="1/h", start="latest"))
    publish_many("orders", [Message(n, key=f"customer-{n % 25:03}") for n in range(50)])
    for _ in range(4):
        good.settle()
        slow.step()
        slow.work()
        slow.flush()
    page = shown("OK", r"For information: sms/orders is limited to 1/h; \d+ messages are waiting\.$", "")
    expect(page.locator("ul.mq-problems > li")).to_contain_text(
        re.compile(r"sms/orders is limited to 1/h; \d+ messages are waiting\.")
    )


def test_slow_handler(shown: Shown, clock: Clock) -> None:
    good = busy(clock=clock)
    slow = Sub(handler("orders", "report", start="latest"))
    publish_many("orders", [Message(n, key=f"customer-{n % 25:03}") for n in range(50)])
    good.settle()
    slow.step()
    clock.advance(1500)
    good.heart.beat()
    slow.heart.beat()
    shown(
        "Degraded",
        r"^report/orders is stalled: it has live subscribers, but no delivery has ended in the last 10 min; "
        r"50 messages are waiting, one of them for 25 min",
        "which messages are in flight",
    )


def test_mode_mismatch_in_a_rollout(shown: Shown, clock: Clock, no_handlers: None) -> None:
    good = busy(clock=clock)
    old = Sub(handler("orders", "billing", start="latest"))
    old.settle()
    subscriber("orders", group="billing", mode="shared")(no_route)
    old.leave()
    publish_many("orders", [Message(n, key=f"customer-{n % 25:03}") for n in range(50)])
    good.settle()
    clock.advance(120)
    good.heart.beat()
    shown(
        "Degraded",
        r"^billing/orders is registered as ordered, but .* mode='shared': subscribers with this code do not start\.$",
        "queuegroupmode",
    )


def test_large_backlog(shown: Shown, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts stop, and say so. (Ten million messages: benchmarks/dashboard.py.)"""
    monkeypatch.setattr(base.Page, "bounds", Bounds(count=1000))
    good = busy(clock=clock)
    behind = Sub(handler("orders", "warehouse", start="latest"))
    publish_many("orders", [Message(n, key=f"customer-{n % 40:03}") for n in range(3000)])
    good.settle()
    behind.step()
    behind.work(10)
    behind.flush()
    clock.advance(60)
    behind.poller.write_rollups()
    for sub in (good, behind):
        sub.heart.beat()
    assert QueueMessage.objects.count() > 3000
    page = shown("OK", r"^3 consumer groups, backlog 1,000\+\. No problems found\.$", "")
    expect(page.locator("#content")).to_contain_text("1,000+")
