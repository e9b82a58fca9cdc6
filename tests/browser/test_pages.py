"""How the pages behave in a browser: live, by keyboard, on a phone, in the dark, under a strict policy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from django.contrib.auth.models import Permission, User
from django.db import OperationalError
from playwright.sync_api import Page, Request, Route, expect

from django_mysqlqueue import Message, operations, publish_many
from django_mysqlqueue.admin.operations import OPERATIONS
from django_mysqlqueue.admin.pages import PAGES
from django_mysqlqueue.models import (
    DeliveryState,
    JobResult,
    Operation,
    OutboxMessage,
    QuarantinedMessage,
    QueueMessage,
    Reader,
    Schedule,
    SubscriberHeartbeat,
)
from django_mysqlqueue.operations import dropping, pausing
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.schedules.timetables import timetable
from tests.browser.conftest import Desk, Open
from tests.browser.looks import BUSY, CUT_OFF, DISORDERED, MIRRORED, RED, TITLES, faults
from tests.browser.pages import card, tab_to
from tests.browser.site import Site
from tests.conftest import QUEUE_MODELS
from tests.support import job_worlds, schedule_worlds
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, groups, run_id
from tests.support.job_pages import NOW, ended, errors, job

REFRESH_MS = 4000
LONG = "order-" + "confirmation" * 6
GROUP = "group/?group=billing&topic=orders"


def fails(delivery: Any) -> None:
    raise ValueError(f"no customer {delivery.payload['n']}: https://shop.example/{'customers' * 12}")


@pytest.fixture
def queue(db: None, settings: Any) -> Sub:
    """Something on every page: failed, in flight, dead, scheduled, silent, paused, with long names."""
    waits = Backoff(initial=3600, jitter=0)
    sub = Sub(
        handler("orders", "billing", fails, max_attempts=3, backoff=waits),
        handler("orders", LONG, fails, max_attempts=1),
        name="host-7",
    )
    publish_many("orders", (Message({"n": n}, key=f"customer-{n % 12:03}") for n in range(24)))
    publish_many("orders", [Message({"n": 100, "text": "x" * 300}, key="k" * 150)])
    publish_many("orders", [Message({"n": 200}, key="k", delay=3600)])
    sequence()
    sub.step()
    sub.work(36)
    sub.flush()
    sub.step()
    sub.poller.write_rollups()
    for _ in sub.poller.maintenance.round():
        pass
    gone = Sub(handler("orders", "billing"), name="host-8")
    SubscriberHeartbeat.objects.filter(subscriber_name=gone.name).update(heartbeat_at=1)
    values = [{"exists": False}, *(f"{LONG}-{n}" for n in range(50))]  # all of the messages match
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["default", "mail"]}}
    long = f"shop.{'tasks' * 30}.mail"
    job("waits", task_path=long, queue_name="q" * 80)
    job("runs", status="RUNNING", started_at=NOW + 1000, worker_ids=f"{LONG * 2}\n", arguments=f'["{"x" * 300}"]')
    ended("failed", "FAILED", errors=errors("no", "y" * 300, "no"), task_path=long, worker_ids="host-7\n" * 3)
    operations.settings(LONG, "orders", {"filter": {LONG: values}}, actor="ada")
    pausing.set_paused(USING, GroupRef(LONG, "orders"), actor="ada", reason="the warehouse moves", paused=True)
    recur()
    record()
    refused = {"payload": b"1", "deliver_at": 0, "created_at": 1, "reason": f"(1644, '{'x' * 300}')"}
    QuarantinedMessage.objects.create(topic="orders", partition_key="k" * 150, message_id="refused", **refused)
    return sub


def record() -> None:
    """An operation that runs, and one that was interrupted."""
    values = {"consumer_group": LONG, "topic": "orders_dlq", "actor": LONG, "reason": "y" * 300, "changed": 120}
    Operation.objects.create(action="redrive", total=2000, **values)
    Operation.objects.create(action="discard", detail=f"error contains '{'x' * 200}'", started_at=1, **values)


def recur() -> None:
    """Schedules in all states, with runs that ended in all ways."""
    registered, daily = schedule_worlds.registered, schedule_worlds.daily
    nightly = daily()._replace(timetable=timetable("0 3 * * *", None, "Europe/Berlin", "UTC"))
    last = registered(nightly, name="nightly-report")
    registered(schedule_worlds.of_topic("orders"), name=LONG, age=3600)
    registered(schedule_worlds.of_task(), name="prices", age=30)
    registered(daily(), name="cleanup")
    schedule_worlds.created(schedule_worlds.of_task(), name="made-by-people")
    Schedule.objects.filter(name="prices").update(paused_at=last)
    Schedule.objects.filter(name="cleanup").update(seen_at=5)
    for days, (status, error) in enumerate(
        (("RUNNING", ""), ("FAILED", "shop.errors.MailServerDown"), ("SUCCESSFUL", ""))
    ):
        tick = last - days * 86_400_000
        JobResult.objects.create(
            id=run_id("nightly-report", tick),
            backend="default",
            queue_name="default",
            task_path="tests.app.jobs.add",
            arguments="{}",
            status=status,
            started_at=tick,
            finished_at=0 if status == "RUNNING" else tick + 92_000,
            errors=f'{{"exception_class_path": "{error}", "traceback": ""}}\n' if error else "",
        )


def queries(sub: Sub) -> list[str]:
    """The address of every page, and of every page that asks."""
    offset = QueueMessage.objects.filter(topic="orders").order_by("offset").values_list("offset", flat=True)[0]
    dead = QueueMessage.objects.filter(topic="orders_dlq").order_by("offset").values_list("offset", flat=True)[0]
    named = {
        "group": [
            "group/?group=billing&topic=orders",
            "group/?group=billing&topic=orders&range=7d",
            f"group/?group={LONG}&topic=orders",
        ],
        "message": [f"message/?offset={offset}"],
        "deadletter": [f"deadletter/?offset={dead}"],
        "messages": ["messages/", "messages/?topic=orders", "messages/?topic=orders&contains=n"],
        "deadletters": ["deadletters/", "deadletters/?group=billing", "deadletters/?state=settled"],
        "jobs": ["jobs/", "jobs/?status=FAILED", "jobs/?task=none"],
        "job": [f"job/?id={name}" for name in ("waits", "runs", "failed", "none")],
        "quarantine": ["quarantine/", "quarantine/?topic=orders"],
        "operations": ["operations/", "operations/?state=running", "operations/?by=nobody"],
        "offsets": ["offsets/", "offsets/?group=billing", "offsets/?group=billing&topic=orders&order=behind"],
        "changelist": ["", "?span=day", "?sort=-backlog"],
    }
    found = [address for page in PAGES for address in named.get(page.name, [f"{page.name}/"])]
    names = ("pause", "resume", "seek", "replay", "retry", "override", "drop")
    found += [f"do/{name}/?group={LONG}&topic=orders" for name in names]

    retrying = DeliveryState.objects.filter(acked=False, delivered_by="").values_list(
        "consumer_group", "topic", "message_offset"
    )
    group, topic, number = retrying.order_by("pk")[0]
    found += [f"do/dead-letter/?group={group}&topic={topic}&row={number}"]
    kind = quote("ValueError: no customer <number>: <address>")
    found += [
        f"do/{name}-error/?group={group}&topic={topic}&kind={kind}&upto={number}" for name in ("retry", "dead-letter")
    ]
    found += [f"do/{name}/?topic=orders_dlq&row={dead}" for name in ("redrive-selected", "discard-selected")]
    Reader.objects.get_or_create(name="lake", defaults={"read_offset": 0})
    found += ["do/drop-reader/?reader=lake"]
    waiting = OutboxMessage.objects.get().outbox_id
    found += [f"do/{name}/?row={waiting}" for name in ("deliver-now", "move", "cancel")]
    found += [f"do/cancel-jobs/?row={quote(json.dumps(name))}" for name in ("waits", "runs", "failed")]
    found += ["do/cancel-task/?topic=jobs.default&task=shop.tasks.mail"]
    found += [f"do/{name}-task/?group=jobs&topic=jobs.default&task=shop.tasks.mail" for name in ("pause", "resume")]
    refused = QuarantinedMessage.objects.get().pk
    found += [f"do/{name}/?row={refused}" for name in ("requeue", "delete-quarantined")]
    found += [f"do/{name}-topic/?topic=orders&upto={refused}" for name in ("requeue", "delete-quarantined")]
    names = ("run", "pause", "delete")
    found += [f"do/{name}-recurring/?schedule=cleanup" for name in names] + ["do/resume-recurring/?schedule=prices"]
    found += ["do/create-recurring/", "do/edit-recurring/?schedule=made-by-people"]
    found += [f"do/replay/?group=billing&topic=orders&first={offset}&last={offset + 9}"]
    # Empty, with a preview, and with errors.
    message = "do/publish/?topic=orders&payload={}&key=k&id=x"
    found += ["do/publish/", f"{message}&delay=60&expires_in=90", f"{message[:-5]}&id=&asked=yes"]
    return [*found, f"do/edit/?offset={dead}", f"do/forget/?subscriber={sub.name}"]


def previews(sub: Sub) -> list[str]:
    """The addresses of operations with values: what they would change, why they cannot, and forms with errors."""
    dead = QueueMessage.objects.filter(topic="orders_dlq").order_by("offset").values_list("offset", flat=True)[0]
    row = DeliveryState.objects.filter(consumer_group="billing", acked=False).order_by("pk")[0].message_offset
    group, time = "group=billing&topic=orders", "time=2100-01-01T00:00:00"
    selected = f"{group}&row={row}"
    found = [f"seek/?{group}&target=earliest", f"seek/?{group}&target=offset&asked=yes", f"retry/?{group}"]
    found += [f"retry-selected/?{selected}&{time}", f"retry/?{group}&{time}"]
    found += [f"override/?{group}&option=rate&value=5/s", f"override/?{group}&option=rate&value=x&asked=yes"]
    found += [f"restore/?group={LONG}&topic=orders&option=filter", f"release/?{group}&row=%22customer-000%22"]
    found += [f"redrive/?topic=orders_dlq&upto={dead + 9}&rate=0.5", f"discard/?topic=orders_dlq&upto={dead + 9}"]
    found += [f"edit/?offset={dead}&payload=%7B%7D", f"edit/?offset={dead}&payload=%7B&asked=yes"]
    found += [f"move/?row={OutboxMessage.objects.get().outbox_id}&asked=yes", "pause/"]
    return [f"do/{one}" for one in found]


PROBLEMS = ("group/?group=x&topic=y", "message/?offset=none", "do/pause/?group=x&topic=y")
"""Addresses of pages that show only why they show nothing."""


def live_text(page: Page) -> Any:
    return page.locator("#mq-state")


@pytest.fixture
def live(desk: Desk) -> Callable[[str], list[Request]]:
    """Opens a page whose time stands still, and returns what it asks for by itself."""

    def begin(address: str) -> list[Request]:
        asked: list[Request] = []
        desk.page.clock.install()
        desk.open(address)
        expect(desk.page.get_by_role("button", name="Pause refreshing")).to_be_visible()
        desk.page.on("request", lambda one: asked.append(one) if one.resource_type == "fetch" else None)
        return asked

    return begin


def refresh(page: Page) -> None:
    """Time passes, and the answer arrives."""
    with page.expect_response(lambda answer: answer.request.resource_type == "fetch"):
        page.clock.run_for(REFRESH_MS)


# -- live ---------------------------------------------------------------------


def test_new_numbers_come_without_a_reload(desk: Desk, live, db: None):
    sub = Sub(handler("orders", "billing"))
    asked = live("")
    page = desk.page
    expect(card(page, "backlog")).to_have_text("0")
    publish_many("orders", (Message(n, key="k") for n in range(7)))
    sequence()
    refresh(page)
    expect(card(page, "backlog")).to_have_text("7")
    sub.settle()
    refresh(page)
    expect(card(page, "backlog")).to_have_text("0")
    assert len(asked) == 2
    page.get_by_role("button", name="Pause refreshing").click()
    expect(live_text(page)).to_have_text("Paused")
    page.clock.run_for(REFRESH_MS * 10)
    button = page.get_by_role("button", name="Resume refreshing")
    assert button.get_attribute("aria-pressed") == "true"
    assert len(asked) == 2
    publish_many("orders", [Message(1, key="k")])
    sequence()
    button.click()
    expect(card(page, "backlog")).to_have_text("1")
    expect(live_text(page)).to_have_text("")


def test_paused_while_an_answer_is_on_its_way(desk: Desk, live, db: None):
    Sub(handler("orders", "billing"))
    live("")
    page = desk.page
    held: list[Route] = []
    page.route(desk.site.url(), lambda route: held.append(route))
    with page.expect_request(desk.site.url()):
        page.clock.run_for(REFRESH_MS)
    page.get_by_role("button", name="Pause refreshing").click()
    publish_many("orders", [Message(1, key="k")])
    sequence()
    with page.expect_response(desk.site.url()):
        held[0].continue_()
    page.clock.run_for(REFRESH_MS * 2)
    expect(live_text(page)).to_have_text("Paused")
    expect(card(page, "backlog")).to_have_text("0")


def test_ticks_scroll_and_focus_outlive_a_refresh(desk: Desk, live, queue: Sub):
    asked = live(GROUP)
    page = desk.page
    page.set_viewport_size({"width": 660, "height": 500})
    ticked = page.get_by_label("Select partition customer-003", exact=True)
    ticked.check()
    page.get_by_label("Select partition customer-005", exact=True).check()
    link = page.get_by_role("link", name="customer-007", exact=True)
    link.focus()
    box = page.locator("section[aria-labelledby=mq-partitions] .mq-scroll")
    box.evaluate("box => { box.scrollLeft = 20; }")
    page.evaluate("window.scrollTo(0, 300)")
    assert page.evaluate("window.scrollY") == 300
    assert box.evaluate("box => box.scrollLeft") == 20
    # What is there after the refresh is another element, not the old one.
    box.evaluate("box => { box.dataset.old = 'yes'; }")
    refresh(page)
    expect(page.locator("[data-old]")).to_have_count(0)
    assert len(asked) == 1
    expect(ticked).to_be_checked()
    expect(page.get_by_label("Select partition customer-005", exact=True)).to_be_checked()
    expect(page.get_by_role("checkbox", checked=True)).to_have_count(2)
    expect(link).to_be_focused()
    # The name of the new state may have made the top a little higher.
    assert abs(page.evaluate("window.scrollY") - 300) < 20
    assert box.evaluate("box => box.scrollLeft") == 20
    # And what was ticked is what is asked about.
    page.get_by_role("button", name="Release leases of selected partitions").click()
    expect(page.get_by_text("whose leases will be released: 2.")).to_be_visible()


def test_select_all_ticks_the_rows_of_its_table(desk: Desk, queue: Sub):
    page = desk.open(GROUP)
    page.get_by_label("Select all").check()
    rows = page.locator("tbody input[type=checkbox]")
    assert rows.count() > 10
    expect(page.locator("tbody input[type=checkbox]:checked")).to_have_count(rows.count())
    page.get_by_label("Select all").uncheck()
    expect(page.locator("tbody input[type=checkbox]:checked")).to_have_count(0)


def test_a_selection_outlives_new_rows_and_those_that_leave_the_page(desk: Desk, live, db: None, monkeypatch: Any):
    """All rows are selected, then others come before them, so that two are on the next page."""
    monkeypatch.setattr("django_mysqlqueue.admin.pages.dead_letters.PAGE_ROWS", 4)
    sub = Sub(handler("orders", "billing", fails, max_attempts=1))

    def fill(count: int) -> list[str]:
        publish_many("orders", (Message({"n": n}, key="k") for n in range(count)))
        sequence()
        sub.settle()
        sequence()
        return [str(one) for one in QueueMessage.objects.filter(topic="orders_dlq").values_list("offset", flat=True)]

    first = fill(4)
    live("deadletters/")
    page = desk.page
    told = page.locator(".mq-selected")
    expect(told).to_have_text("0 of these 4 selected")
    page.get_by_label("Select all").check()
    expect(told).to_have_text("4 of these 4 selected")
    expect(page.locator(".mq-matching")).to_have_text("All (4):")
    fill(2)
    refresh(page)
    expect(page.locator(".mq-matching")).to_have_text("All (6):")
    expect(told).to_have_text("4 selected, 2 of them no longer on this page")
    expect(page.locator("tbody input[type=checkbox]:checked")).to_have_count(2)
    assert page.get_by_label("Select all").evaluate("box => [box.checked, box.indeterminate]") == [False, True]
    refresh(page)
    expect(told).to_have_text("4 selected, 2 of them no longer on this page")
    page.get_by_role("button", name="Redrive selected").click()
    expect(page.get_by_text("Dead letters of orders_dlq that will be redriven")).to_contain_text("4")
    chosen = page.locator("input[name=row]").evaluate_all("found => found.map(one => one.value)")
    assert sorted(chosen) == sorted(first)
    # To untick all drops these, too.
    live("deadletters/")
    page.get_by_label("Select all").check()
    fill(1)
    refresh(page)
    expect(told).to_have_text("4 selected, 1 of them no longer on this page")
    page.get_by_label("Select all").check()
    expect(told).to_have_text("5 selected, 1 of them no longer on this page")
    page.get_by_label("Select all").uncheck()
    expect(told).to_have_text("0 of these 4 selected")


@pytest.mark.parametrize("width", [390, 1280])
def test_the_bar_of_a_selection_stays_in_sight(open_desk: Open, queue: Sub, width: int):
    page = open_desk(width=width, height=400).open("deadletters/?topic=orders")
    bar = page.locator(".mq-selection")
    bar.scroll_into_view_if_needed()
    page.locator("tbody tr").last.scroll_into_view_if_needed()
    page.mouse.wheel(0, 200)
    page.wait_for_function("window.scrollY > 300")
    expect(page.get_by_role("button", name="Redrive selected")).to_be_in_viewport(ratio=1)
    box = bar.bounding_box()
    assert box is not None
    assert box["y"] == 0


@pytest.mark.parametrize("scripts", [True, False])
def test_a_key_of_two_lines_is_found_again_by_the_form(open_desk: Open, db: None, scripts: bool):
    sub = Sub(handler("orders", "billing"), name="host\n7")
    keys = ("two\nlines", "two lines", "two\\u000alines", "\u202etwo")
    publish_many("orders", (Message(key, key=key) for key in keys))
    sequence()
    sub.step()
    desk = open_desk(java_script_enabled=scripts)
    rows = desk.page.locator("#mq-live tbody tr")
    show = desk.page.get_by_role("button", name="Show", exact=True)
    for key, shown in (("two\nlines", "two\\u000alines"), ("\u202etwo", "\\u202etwo")):
        desk.open("messages/?topic=orders")
        desk.page.locator(f'#mq-live a[href*="key={quote(key)}&"]').click()
        for _ in range(2):
            expect(rows).to_have_count(1)
            expect(rows.locator("td").nth(1)).to_have_text(shown)
            expect(desk.page.get_by_label("Partition (exact)")).to_have_value(shown)
            show.click()
        # What is typed is meant as it is.
        desk.page.get_by_label("Partition (exact)").fill("two lines")
        show.click()
        expect(rows.locator("td").nth(1)).to_have_text("two lines")
    for label, address in (("Owner (exact)", "offsets/?owner="), ("Subscriber (exact)", "inflight/?subscriber=")):
        desk.open(f"{address}{quote(sub.name)}")
        rows = desk.page.locator("section:is([aria-labelledby=mq-offsets], [aria-labelledby=mq-inflight]) tbody tr")
        for _ in range(2):
            expect(rows).to_have_count(4)
            expect(desk.page.get_by_label(label, exact=True)).to_have_value(sub.name.replace("\n", "\\u000a"))
            show.click()


@pytest.mark.parametrize("scripts", [True, False])
def test_in_flight_is_filtered_without_scripts_and_again_on_back(open_desk: Open, queue: Sub, scripts: bool):
    Sub(handler("orders", "search"), name="host-9").step()
    page = open_desk(java_script_enabled=scripts).open("inflight/")
    rows = page.locator("#mq-live tbody tr")
    every = rows.count()
    page.get_by_label("Group").select_option("search")
    page.get_by_label("Topic").select_option("orders")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page).to_have_url(re.compile(r"group=search&topic=orders"))
    expect(page.get_by_label("Group")).to_have_value("search")
    assert 0 < rows.count() < every
    expect(rows.filter(has_text="search")).to_have_count(rows.count())
    page.get_by_label("Subscriber (exact)").fill("host-9")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_text("No messages in flight match.")).to_be_visible()
    page.go_back()
    expect(page.get_by_label("Group")).to_have_value("search")
    expect(page.get_by_label("Subscriber (exact)")).to_have_value("")
    page.go_back()
    # The choice is what the list shows.
    expect(page.get_by_label("Group")).to_have_value("")
    expect(page.get_by_label("Topic")).to_have_value("")
    expect(rows).to_have_count(every)
    page.locator("#mq-live tbody td a", has_text="host-9").first.click()
    expect(page.get_by_label("Subscriber (exact)")).to_have_value(re.compile("^host-9:"))
    page.get_by_role("link", name="Show all").click()
    expect(rows).to_have_count(every)


def test_offsets_are_filtered_without_scripts_and_again_on_back(open_desk: Open, queue: Sub):
    desk = open_desk(java_script_enabled=False)
    page = desk.open("offsets/")
    page.get_by_label("Group").select_option("billing")
    page.get_by_label("Partition key begins with").fill("customer-01")
    page.locator("select[name=order]").select_option("behind")
    page.get_by_role("button", name="Show", exact=True).click()
    rows = page.locator("#mq-live tbody tr")
    expect(rows).to_have_count(2)
    expect(page.get_by_text("furthest behind among the 2 partitions")).to_be_visible()
    page.locator(".mq-heat a").first.click()
    expect(rows).to_have_count(1)
    expect(page.get_by_label("Partition key begins with")).to_have_value("customer-010")
    page.go_back()
    expect(rows).to_have_count(2)
    expect(page.get_by_label("Group")).to_have_value("billing")
    expect(page.get_by_label("Partition key begins with")).to_have_value("customer-01")
    expect(page.locator("select[name=order]")).to_have_value("behind")
    page.get_by_role("link", name="Show all").click()
    expect(page.get_by_label("Group")).to_have_value("")


def test_the_heat_map_by_keyboard(desk: Desk, live, queue: Sub):
    live("offsets/?group=billing")
    page = desk.page
    tab_to(page, "Skip to the table")
    expect(page.get_by_role("link", name="Skip to the table")).to_be_in_viewport()
    page.keyboard.press("Tab")
    cell = page.locator(".mq-heat a").first
    expect(cell).to_be_focused()
    # What the mouse reads in a tooltip.
    value = page.locator("#mq-heat-value")
    expect(value).to_have_text(re.compile(r"^customer-000: \d+ messages?$"))
    expect(value).to_have_text(cell.get_attribute("aria-label") or "-")
    cell.evaluate("one => { one.dataset.old = 'yes'; }")
    refresh(page)
    expect(page.locator("[data-old]")).to_have_count(0)
    expect(cell).to_be_focused()
    expect(value).to_have_text(cell.get_attribute("aria-label") or "-")
    page.keyboard.press("Shift+Tab")
    expect(value).to_have_text("")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Release leases")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    expect(page.locator(".mq-heat a").last).to_be_focused()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("prefix="))
    expect(page.locator("#mq-live tbody tr")).to_have_count(1)


def test_the_heat_map_by_touch(open_desk: Open, queue: Sub):
    """A tap leads to the row that has the figures."""
    page = open_desk(has_touch=True).open("offsets/?group=billing&topic=orders")
    page.locator(".mq-heat a").first.tap()
    expect(page).to_have_url(re.compile("prefix=customer-000"))
    expect(page.locator("#mq-live tbody tr")).to_have_count(1)


def test_a_hidden_tab_asks_nothing(desk: Desk, live, queue: Sub):
    asked = live("")
    page = desk.page
    show = "hidden => { Object.defineProperty(document, 'hidden', {configurable: true, get: () => hidden});"
    show += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(show, True)
    page.clock.run_for(REFRESH_MS * 20)
    assert asked == []
    with page.expect_response(lambda answer: answer.request.resource_type == "fetch"):
        page.evaluate(show, False)
    refresh(page)
    assert len(asked) == 2


BEFORE = "one => getComputedStyle(one, '::before').content"
SIZE = "one => parseFloat(getComputedStyle(one).fontSize)"


def is_old(page: Page, reason: str) -> None:
    """All says that the page is old, and from when: the banner, the tab, and what was there, which is still there."""
    at = page.locator("#mq-live").get_attribute("data-at")
    expect(page.locator("#mq-old h2")).to_have_text(f"As of {at}")
    expect(page.locator("#mq-old p")).to_have_text(reason)
    assert page.title().startswith(f"As of {at} \u00b7 Dashboard")
    assert (page.locator("#mq-icon").get_attribute("href") or "").endswith("stale.svg")
    assert page.locator("#mq-live").evaluate("one => getComputedStyle(one).filter") == "grayscale(1)"
    assert page.locator("#mq-status").evaluate(BEFORE) == '"Last known state: "'
    assert page.locator("#mq-status").evaluate(SIZE) < page.locator("#mq-old h2").evaluate(SIZE)
    expect(card(page, "scheduled")).to_have_text("1")


def is_new(page: Page) -> None:
    """Nothing says that the page is old."""
    expect(page.locator("#mq-old")).to_be_hidden()
    state = page.locator("#mq-status").inner_text()
    assert page.title().startswith(f"{state} \u00b7 Dashboard")
    assert (page.locator("#mq-icon").get_attribute("href") or "").endswith(f"{state.lower()}.svg")
    assert page.locator("#mq-live").evaluate("one => getComputedStyle(one).filter") == "none"
    assert page.locator("#mq-status").evaluate(BEFORE) == "none"


def test_a_server_that_is_gone_and_comes_back(desk: Desk, live, site: Site, queue: Sub):
    live("")
    page = desk.page
    is_new(page)
    site.stop()
    page.clock.run_for(REFRESH_MS)
    is_old(page, "The server does not respond.")
    assert faults(page) == []
    site.start()
    refresh(page)
    is_new(page)
    assert all("net::ERR_" in text for text in desk.complaints)
    desk.complaints.clear()


def test_a_session_that_has_ended(desk: Desk, live, queue: Sub):
    """It is seen too that somebody has logged in again, in another tab."""
    live("")
    page = desk.page
    cookies = page.context.cookies()
    page.context.clear_cookies()
    refresh(page)
    is_old(page, "Your session has expired: log in again.")
    page.context.add_cookies(cookies)  # type: ignore[arg-type]
    refresh(page)
    is_new(page)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"status": 503, "body": "<p data-state=Stopped><bdi>The database is gone."}, "The database is gone."),
        ({"status": 500, "body": "<p class=errornote>A setting is wrong."}, "A setting is wrong."),
        ({"status": 502, "body": "Bad gateway"}, "The server reports an error: 502."),
        ({"status": 200, "body": "Log in"}, "Your session has expired: log in again."),
    ],
)
def test_an_answer_without_data(desk: Desk, live, queue: Sub, answer: dict[str, Any], reason: str):
    live("")
    page = desk.page
    page.route(desk.site.url(), lambda route: route.fulfill(content_type="text/html", **answer))
    refresh(page)
    is_old(page, reason)
    page.unroute(desk.site.url())
    refresh(page)
    is_new(page)
    desk.forget_statuses()


def test_a_database_that_does_not_answer(desk: Desk, live, queue: Sub, monkeypatch: pytest.MonkeyPatch):
    live("")
    page = desk.page

    def fail(*_: object) -> None:
        raise OperationalError(2013, "Lost connection")

    with monkeypatch.context() as patch:
        patch.setattr("django_mysqlqueue.admin.pages.base.read_shared", fail)
        patch.setattr("django_mysqlqueue.sql.failures.kind_of", lambda using, error: "no_answer")
        refresh(page)
    is_old(page, "The database 'default' does not answer: (2013, 'Lost connection')")
    refresh(page)
    is_new(page)
    desk.forget_statuses()


def test_a_refresh_that_hangs_is_seen_and_is_the_only_one(desk: Desk, live, queue: Sub):
    asked = live("")
    page = desk.page
    held: list[Route] = []
    page.route(desk.site.url(), lambda route: held.append(route))
    with page.expect_request(desk.site.url()):
        page.clock.run_for(REFRESH_MS)
    page.clock.run_for(5000)
    is_new(page)
    page.clock.run_for(1000)
    is_old(page, "The server does not respond.")
    page.clock.run_for(20_000)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.clock.run_for(1000)
    assert len(asked) == 1
    held[0].continue_()
    is_new(page)
    # One that never comes is given up.
    with page.expect_request(desk.site.url()):
        page.clock.run_for(REFRESH_MS)
    with page.expect_event("requestfailed"):
        page.clock.run_for(30_000)
    is_old(page, "The server does not respond.")
    page.unroute(desk.site.url())
    refresh(page)
    is_new(page)
    desk.complaints.clear()


def test_a_page_without_a_state_has_an_icon_only_while_it_is_old(desk: Desk, live, queue: Sub):
    live("operations/")
    page, icon = desk.page, desk.page.locator("#mq-icon")
    assert icon.count() == 0
    page.route("**/operations/", lambda route: route.fulfill(status=502))
    refresh(page)
    expect(icon).to_have_attribute("href", "/static/django_mysqlqueue/stale.svg")
    expect(page).to_have_title(re.compile(r"^As of \d\d:\d\d:\d\d \u00b7 Operations"))
    page.unroute("**/operations/")
    refresh(page)
    expect(icon).to_have_count(0)
    expect(page).to_have_title(re.compile(r"^Operations"))
    desk.forget_statuses()


def test_the_interval_is_chosen_and_remembered(desk: Desk, live, queue: Sub):
    asked = live("")
    page = desk.page
    choice = page.get_by_label("Refresh every")
    expect(choice).to_have_value("4")
    choice.select_option("30 s")
    page.clock.run_for(29_000)
    assert asked == []
    with page.expect_response(lambda answer: answer.request.resource_type == "fetch"):
        page.clock.run_for(1000)
    desk.open("operations/")
    expect(choice).to_have_value("30")
    choice.select_option("2 s")
    with page.expect_response(lambda answer: answer.request.resource_type == "fetch"):
        page.clock.run_for(2000)
    page.evaluate("localStorage.setItem('mq-interval', '0.001')")
    desk.open("operations/")
    expect(choice).to_have_value("4")


def test_the_index_of_the_admin_shows_the_state_when_it_is_known(desk: Desk, queue: Sub):
    page = desk.page
    page.goto(f"{desk.site.origin}/admin/")
    banner = page.locator(".mq-banner")
    expect(banner.locator("h2")).to_have_text(re.compile("^Message queue: (Stopped|Degraded)$"))
    expect(banner.locator("bdi")).not_to_be_empty()
    banner.get_by_role("link", name="Open dashboard").click()
    expect(page).to_have_url(desk.site.url())


def test_a_job_is_followed_to_its_end(desk: Desk, live, db: None):
    job("j1", status="RUNNING", started_at=NOW, worker_ids="w\n")
    asked = live("job/?id=j1")
    page = desk.page
    status = page.locator("#mq-job .mq-tag")
    expect(status).to_have_text("running")
    ended = {"status": "SUCCESSFUL", "last_attempted_at": NOW, "finished_at": NOW + 5000, "return_value": '"sent"'}
    JobResult.objects.update(**ended)
    refresh(page)
    expect(status).to_have_text("successful")
    expect(page.get_by_text('"sent"')).to_be_visible()
    expect(page.get_by_role("img", name="last attempt: 5 s")).to_be_visible()
    expect(page.get_by_role("button", name="Pause refreshing")).to_be_hidden()
    number = len(asked)
    page.clock.run_for(REFRESH_MS * 10)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    assert len(asked) == number == 1, "nothing more can change"


def test_a_group_that_goes_while_it_is_looked_at(desk: Desk, live, db: None):
    Sub(handler("orders", "billing"))
    live(GROUP)
    dropping.drop(USING, GroupRef("billing", "orders"), actor="somebody else")
    refresh(desk.page)
    expect(desk.page.get_by_text("There is no group billing/orders.")).to_be_visible()
    expect(live_text(desk.page)).to_have_text("")
    assert all("404" in text for text in desk.complaints)
    desk.complaints.clear()


# -- looks --------------------------------------------------------------------


@pytest.mark.timeout(300)
@pytest.mark.parametrize("language", ["en", "ar"])
@pytest.mark.parametrize("operations", [False, True], ids=["pages", "operations"])
def test_every_page_is_accessible_fits_and_keeps_the_policy(
    open_desk: Open, queue: Sub, settings: Any, operations: bool, language: str
):
    """What the policy stops is a complaint of the desk.

    In English, no figure of a busy queue is cut off on a laptop, even beside the admin's list of models. From right to
    left, code, charts, times and numbers are not mirrored. What cannot be undone is red, and nothing else.
    """
    settings.LANGUAGE_CODE = language
    schemes = {"en": "light", "ar": "dark"}
    desk = open_desk()
    page = desk.page
    every = [*queries(queue), *previews(queue), *PROBLEMS]
    addresses = [address for address in every if address.startswith("do/") == operations]
    found, kinds = {}, set()
    for address in addresses:
        desk.open(address)
        found[address] = [*faults(page, first=schemes[language]), *page.evaluate(TITLES)]
        red = page.evaluate(RED)
        found[address] += [f"red: {is_red}: {name}" for name, is_red in red if is_red != OPERATIONS[name].dangerous]
        if language == "ar":
            assert page.evaluate("document.documentElement.dir") == "rtl"
            found[address] += [*page.evaluate(MIRRORED), *page.evaluate(DISORDERED)]
            kinds |= set(
                page.evaluate("[...document.querySelectorAll('pre, textarea, .mq-key')].map((one) => one.tagName)")
            )
        elif not operations:
            page.evaluate(BUSY)
            for sidebar in ("open", "closed"):
                expect(page.locator("#nav-sidebar")).to_be_visible(visible=sidebar == "open")
                found[address] += [f"cut off, sidebar {sidebar}: {one}" for one in page.evaluate(CUT_OFF)]
                page.locator("#toggle-nav-sidebar").click()
    desk.forget_statuses()
    assert not any(found.values()), "\n".join(f"{address}: {text}" for address, one in found.items() for text in one)
    assert kinds == (set() if language == "en" else {"PRE", "TEXTAREA"} | (set() if operations else {"SPAN"}))
    opened = {address.split("?")[0].strip("/") or "changelist" for address in addresses}
    assert opened == ({f"do/{name}" for name in OPERATIONS} if operations else {page.name for page in PAGES})


def test_pages_without_rows_and_without_operations_are_accessible(
    open_desk: Open, queue: Sub, user: User, settings: Any
):
    """Those of a reader, who sees no payloads and has no buttons, and those of an empty queue."""
    User.objects.update(is_superuser=False)
    names = ("view_dashboard", "view_operation")
    user.user_permissions.set(Permission.objects.filter(codename__in=names))
    desk = open_desk()
    found = {}
    pages = {address.split("?")[0]: address for address in queries(queue) if not address.startswith("do/")}
    for address in pages.values():
        found[f"reader: {address}"] = faults(desk.open(address))
        buttons = desk.page.locator(".mq-page form[method=post] :is(button, input[type=submit]):visible")
        assert buttons.count() == 0, address
    for model in QUEUE_MODELS:
        model.objects.all().delete()
    for page in PAGES:
        address = "" if page.name == "changelist" else f"{page.name}/"
        found[f"empty: {address}"] = faults(desk.open(address))
    desk.forget_statuses()
    assert not any(found.values()), "\n".join(f"{address}: {text}" for address, one in found.items() for text in one)


def test_a_missing_reason_and_a_message_after_an_operation_are_accessible(desk: Desk, queue: Sub):
    page = desk.open(next(one for one in queries(queue) if one.startswith("do/discard-selected/")))
    page.get_by_role("button", name="Discard selected dead letters").click()
    expect(page.get_by_text("Enter a reason")).to_be_visible()
    assert faults(page) == []
    page.get_by_label("Reason, for the audit log").fill("spam")
    page.get_by_role("button", name="Discard selected dead letters").click()
    expect(page.locator(".messagelist")).to_contain_text("1")
    assert faults(page) == []


def test_without_scripts_no_page_has_a_control_that_needs_them(open_desk: Open, queue: Sub):
    desk = open_desk(java_script_enabled=False)
    dead = {}
    for address in {address.split("?")[0]: address for address in queries(queue)}.values():
        page = desk.open(address)
        expect(page.locator(".mq-page")).to_be_visible()
        if count := page.locator(".mq-page :is(button[type=button], .mq-all):visible").count():
            dead[address] = count
    assert dead == {}
    assert desk.open("deadletters/").locator(".mq-all").count() == 1


def test_a_message_is_copied(open_desk: Open, queue: Sub):
    desk = open_desk(permissions=["clipboard-read", "clipboard-write"])
    offset = QueueMessage.objects.filter(topic="orders").order_by("offset").values_list("offset", flat=True)[0]
    page = desk.open(f"message/?offset={offset}")
    page.get_by_text("Copy", exact=True).click()
    page.get_by_role("button", name="Copy command").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    text = page.evaluate("navigator.clipboard.readText()")
    assert text == f"manage.py queuetail orders --offset {offset} --limit 1 --format json"
    page.get_by_role("button", name="Copy JSON").click()
    expect(page.get_by_role("button", name="Copied")).to_have_count(2)
    assert json.loads(page.evaluate("navigator.clipboard.readText()"))["offset"] == offset


# -- by keyboard --------------------------------------------------------------


@pytest.mark.parametrize("touch", [False, True])
def test_values_of_the_overviews_charts_by_keyboard_and_by_touch(open_desk: Open, queue: Sub, touch: bool):
    page = open_desk(has_touch=touch).open()
    plot = page.locator("#mq-plot-throughput")
    values = plot.locator(".mq-values")
    if touch:
        plot.scroll_into_view_if_needed()
        box = plot.locator(".mq-chart").bounding_box()
        assert box is not None
        page.touchscreen.tap(box["x"] + box["width"] - 1, box["y"] + box["height"] / 2)
    else:
        plot.focus()
        page.keyboard.press("End")
    expect(values).to_have_text(re.compile(r" · acked 0 · failed \d+ · dead-lettered \d+$"))
    expect(page.locator("#mq-plot-latency .mq-values")).to_have_text(re.compile(" · p50 - · p95 -$"))
    page.get_by_text("Values as a table").click()
    expect(page.locator("#mq-values tbody tr")).to_have_count(60)


def test_times_need_no_mouse_to_be_read(desk: Desk, queue: Sub):
    page = desk.open("recurring/")
    row = page.locator("tr", has_text="prices")
    time = row.locator(".mq-time", has_text="ago")
    assert time.locator("span").bounding_box()["width"] <= 1  # type: ignore[index]
    time.focus()
    assert time.locator("span").bounding_box()["width"] > 100  # type: ignore[index]
    link = page.get_by_role("link", name="failed").first
    link.focus()
    assert link.locator(".mq-time span").bounding_box()["width"] > 100  # type: ignore[index]


def test_everything_by_keyboard_from_the_login_on(open_desk: Open, queue: Sub):
    desk = open_desk(login=False)
    page = desk.open(GROUP)
    expect(page.get_by_label("Username:")).to_be_focused()
    page.keyboard.type("ada")
    page.keyboard.press("Tab")
    page.keyboard.type("lovelace")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Group billing/orders")).to_be_visible()
    tab_to(page, "Pause refreshing")
    page.keyboard.press("Space")
    expect(live_text(page)).to_have_text("Paused")
    tab_to(page, "Pause")
    page.keyboard.press("Enter")
    reason = page.get_by_label("Reason, for the audit log")
    expect(reason).to_be_visible()
    for _ in range(80):
        page.keyboard.press("Tab")
        if reason.evaluate("one => one === document.activeElement"):
            break
    page.keyboard.type("stocktaking")
    tab_to(page, "Pause group")
    page.keyboard.press("Enter")
    expect(page.get_by_text("billing/orders is paused.")).to_be_visible()
    found = groups.find(USING, GroupRef("billing", "orders"))
    assert found is not None
    assert found.paused


def test_the_menu_has_one_line_beside_the_sidebar_with_the_button_at_its_end(desk: Desk, queue: Sub):
    """Tabs in bold are wider."""
    for address in ("operations/", "deadletters/", ""):
        page = desk.open(address)
        expect(page.locator("#nav-sidebar")).to_be_visible()
        expect(page.locator(".mq-menu a")).to_have_count(7)
        expect(page.locator("#mq-pause")).to_be_visible()
        tops = page.locator(".mq-menu a").evaluate_all("all => all.map((one) => one.getBoundingClientRect().top)")
        assert len(set(tops)) == 1, address
        button, line = page.locator("#mq-pause").bounding_box(), page.locator(".mq-top").bounding_box()
        assert button is not None
        assert line is not None
        assert abs(button["x"] + button["width"] - line["x"] - line["width"]) < 2
        assert abs(button["y"] - tops[0]) < 16


@pytest.mark.parametrize("language", ["en", "ar"])
def test_a_phone_shows_rows_with_labels_and_nothing_off_the_screen(
    open_desk: Open, queue: Sub, settings: Any, language: str
):
    settings.LANGUAGE_CODE = language
    desk = open_desk(width=390)
    for address in (
        "operations/",
        "recurring/",
        "",
        "inflight/",
        "deadletters/",
        "jobs/",
        "tasks/",
        "messages/",
        "scheduled/",
    ):
        page = desk.open(address)
        assert page.locator(".mq-stack tbody td[data-label]").count() > 1, address
        found = page.evaluate(
            """() => [...document.querySelectorAll('.mq-stack tbody td')].filter((one) => one.childNodes.length)
              .map((one) => [one.getBoundingClientRect(), getComputedStyle(one, '::before').content, one.dataset.label])
              .map(([box, shown, label]) => [box.left >= 0, box.right <= innerWidth, !label || shown.includes(label)])
              .filter((one) => one.includes(false)).length"""
        )
        assert found == 0, address
        fits = "all => all.every((one) => one.scrollWidth <= one.clientWidth + 1)"
        assert page.locator(".mq-scroll:has(.mq-stack)").evaluate_all(fits), address


def test_a_table_that_continues_behind_an_edge_shows_a_shadow_there(open_desk: Open, queue: Sub):
    page = open_desk(width=320).open("")
    page.locator("#mq-history-table summary").click()
    box = page.locator(".mq-scroll:has(#mq-values)")
    assert box.evaluate("one => one.scrollWidth > one.clientWidth + 20")
    assert box.evaluate("one => getComputedStyle(one).backgroundAttachment") == "local, local, scroll, scroll"
    row = box.locator("tbody tr").first
    assert row.evaluate("one => getComputedStyle(one).backgroundColor") == "rgba(0, 0, 0, 0)", "it would hide them"
