"""The pages of a queue in several databases in a browser: the choice of one, by keyboard, on a phone, in the dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connections
from playwright.sync_api import expect

from django_mysqlqueue import publish
from django_mysqlqueue.admin.pages import base
from django_mysqlqueue.inspection import StallTimes
from django_mysqlqueue.models import ConsumerGroup
from tests.browser.conftest import Desk, Open
from tests.browser.looks import faults
from tests.browser.pages import tab_to
from tests.support.processes import SHORT
from tests.support.two_databases import ALIASES, DEFAULT, QUEUE, SETTINGS, fill

REFRESH_MS = 4000
PAGES = (
    "",
    "?database=queue",
    "?database=empty",
    "messages/",
    "messages/?topic=orders&database=default",
    "messages/?database=nowhere",
    "operations/?database=queue",
)


@pytest.fixture
def both(site: Any, queue_db: None, settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Two databases with the same topics, and one without tables.

    That one is not in memory: Django does not close connections to those, and Python complains of each request's.
    """
    empty = connections.configure_settings(
        {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "empty.sqlite3")}}
    )["default"]
    monkeypatch.setitem(connections.settings, "empty", empty)
    monkeypatch.setitem(settings.DATABASES, "empty", empty)
    settings.MYSQLQUEUE = {**SHORT, "TOPICS": {**SETTINGS["TOPICS"], "stock": {"DATABASE": "empty"}}}
    for alias in ALIASES:
        fill(alias)
    yield
    site.stop()


def test_the_pages_are_accessible_and_fit(open_desk: Open, both: None):
    desk = open_desk()
    found = {address: faults(desk.open(address)) for address in PAGES}
    desk.forget_statuses()
    assert not any(found.values()), "\n".join(f"{address}: {text}" for address, one in found.items() for text in one)


def test_a_database_is_chosen_by_keyboard_and_operated_on(desk: Desk, both: None, monkeypatch: pytest.MonkeyPatch):
    # Otherwise it depends on the machine's speed whether what waits in the two databases stands still already.
    monkeypatch.setattr(base.Page, "stall_times", StallTimes(stuck=3600, started=3600))
    page = desk.open()
    expect(page.get_by_role("navigation", name="Databases of the queue").get_by_text("All")).to_have_attribute(
        "aria-current", "true"
    )
    expect(page.locator(".mq-banner h2")).to_have_text("Degraded")
    tab_to(page, DEFAULT)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Dashboard (default)")).to_be_visible()
    tab_to(page, "g")
    page.keyboard.press("Enter")
    # By its topic alone, it would be the other one.
    expect(page.get_by_role("heading", name="Group g/orders (default)")).to_be_visible()
    page.get_by_role("link", name="Offsets in all partitions").click()
    expect(page.get_by_role("heading", name="Offsets (default)")).to_be_visible()
    page.get_by_label("Partition key begins with").fill("default.b")
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="default.b", exact=True)).to_be_visible()
    page.get_by_role("link", name="g/orders", exact=True).click()
    page.get_by_role("link", name="Pause", exact=True).click()
    expect(page.get_by_role("heading", name="Pause group (default)")).to_be_visible()
    page.get_by_role("button", name="Pause group").click()
    expect(page.get_by_text("The group g/orders is paused.")).to_be_visible()
    expect(page.get_by_role("heading", name="Group g/orders (default)")).to_be_visible()
    paused = {alias: ConsumerGroup.objects.using(alias).get().paused for alias in ALIASES}
    assert paused == {DEFAULT: True, QUEUE: False}


def test_the_overview_of_all_refreshes(desk: Desk, both: None):
    page = desk.page
    page.clock.install()
    desk.open()
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=QUEUE, exact=True))
    expect(row).to_contain_text("Stopped")
    expect(row.get_by_role("cell").nth(6)).to_have_text("0")
    publish("orders", 1)
    with page.expect_response(lambda answer: answer.request.resource_type == "fetch"):
        page.clock.run_for(REFRESH_MS)
    expect(row.get_by_role("cell").nth(6)).to_have_text("1")
