"""Something breaks; a person finds it in the dashboard and mends it there, without a shell."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connections
from playwright.sync_api import Page, expect

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import ConsumerGroup, DeliveryState, Operation, QueueMessage, SubscriberHeartbeat
from tests.app.models import Effect
from tests.browser.conftest import WAIT_MS, Desk, Start
from tests.browser.pages import card
from tests.support.harness import USING, sequence
from tests.support.internals import GroupRef, groups
from tests.support.processes import Worker, effects, wait_for

expect.set_options(timeout=WAIT_MS)


def problem(page: Page, text: str):
    """A cause in the list of problems."""
    return page.locator("ul.mq-problems > li").filter(has_text=text)


def all_is_well(page: Page) -> None:
    expect(page.locator(".mq-banner h2")).to_have_text("OK")


@contextmanager
def flow(topic: str) -> Iterator[list[int]]:
    """Somebody publishes one message after another; what was published is in the list."""
    published: list[int] = []
    stop = threading.Event()

    def work() -> None:
        try:
            while not stop.wait(0.05):
                publish(topic, {"n": len(published)}, key=f"k{len(published) % 3}")
                published.append(len(published))
        finally:
            connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield published
    finally:
        stop.set()
        thread.join()


def test_a_killed_subscriber_is_seen_and_forgotten_and_another_goes_on(desk: Desk, start: Start, tmp_path: Path):
    go = tmp_path / "go"
    doomed, other = start("slow"), start("slow")
    publish_many("b.slow", (Message({"n": n, "go": str(go)}, key=f"k{n % 8}") for n in range(24)))
    names = {row.info["pid"]: row.subscriber_name for row in SubscriberHeartbeat.objects.all()}
    page = desk.open("inflight/")
    rows = page.locator("section[aria-labelledby=mq-subscribers]").get_by_role("row")
    row = rows.filter(has_text=names[doomed.process.pid])
    expect(row.get_by_text(re.compile(r"slow/b\.slow: [1-9]"))).to_be_visible()
    # Without a heartbeat from after the start of the other one, it would count as replaced by it.
    wait_for(lambda: heartbeat(doomed).heartbeat_at > heartbeat(other).info["started_at"])

    doomed.send(signal.SIGKILL)
    doomed.wait()
    page.get_by_role("link", name="Overview").last.click()
    found = problem(page, f"Subscriber {names[doomed.process.pid]} of")
    expect(found).to_be_visible()
    found.get_by_role("link", name="Open in flight").click()
    expect(row.get_by_text("lost", exact=True)).to_be_visible()
    # The one that is alive cannot be forgotten.
    expect(rows.filter(has_text=names[other.process.pid]).get_by_text("live")).to_be_visible()
    expect(page.get_by_role("link", name="Forget")).to_have_count(1)
    row.get_by_role("link", name="Forget").click()
    expect(page.get_by_text("Its process must not be running.")).to_be_visible()
    page.get_by_role("button", name="Forget a lost subscriber").click()
    expect(page.get_by_text(f"{names[doomed.process.pid]} is forgotten")).to_be_visible()
    expect(row).to_have_count(0)

    go.touch()
    page.get_by_role("link", name="Overview").last.click()
    expect(card(page, "backlog")).to_have_text("0")
    all_is_well(page)
    assert sorted({number for _, _, number in effects("slow")}) == list(range(24))
    assert Operation.objects.get(action="forget").actor == "ada"


def heartbeat(worker: Worker) -> SubscriberHeartbeat:
    """The heartbeat of a process."""
    [found] = (row for row in SubscriberHeartbeat.objects.all() if row.info["pid"] == worker.process.pid)
    return found


@pytest.mark.parametrize("finishes", [True, False])
def test_a_subscriber_that_is_stopped_leaves_nothing_prefetched_in_flight(
    desk: Desk, start: Start, tmp_path: Path, finishes: bool
):
    worker = start("slow")
    go = tmp_path / "go"
    publish_many("b.slow", (Message({"go": str(go), "n": n}, key="k") for n in range(5)))
    wait_for(lambda: DeliveryState.objects.filter(delivery_token__gt=0).count() == 5, worker)
    rows = desk.open("inflight/").locator("section[aria-labelledby=mq-inflight] tbody tr")
    expect(rows).to_have_count(5)
    worker.send(signal.SIGTERM)
    # The one that is being handled.
    wait_for(lambda: DeliveryState.objects.filter(delivery_token__gt=0).count() == 1, worker)
    expect(desk.open("inflight/").locator("section[aria-labelledby=mq-inflight] tbody tr")).to_have_count(1)
    if finishes:
        go.touch()
    # Otherwise the handler does not end within SHUTDOWN_TIMEOUT, and is cut off.
    assert (worker.wait() == 0) == finishes
    expect(desk.open("inflight/").get_by_text("No messages are in flight.")).to_be_visible()
    assert not DeliveryState.objects.filter(retry_count__gt=0).exists()
    expect(desk.open("inflight/").get_by_text("No subscriber is running.")).to_be_visible()
    page = desk.open()
    expect(page.locator("[data-kind=silent]")).to_have_count(0)


def test_a_poisoned_partition_is_found_and_retried_after_the_mend(desk: Desk, start: Start, tmp_path: Path):
    mended = tmp_path / "mended"
    start("fragile")
    publish("b.fragile", {"n": 1, "mended": str(mended)}, key="berlin")
    publish("b.fragile", {"n": 2}, key="berlin")
    page = desk.open()
    head = QueueMessage.objects.order_by("offset").values_list("offset", flat=True)
    failing = problem(page, "fragile/b.fragile: every attempt has failed")
    expect(failing).to_be_visible()
    expect(failing).to_contain_text("ValueError: the warehouse does not answer")
    failing.get_by_text("1 symptom").click()
    stuck = failing.get_by_role("listitem").filter(has_text=f"essage {head[0]}")
    expect(stuck).to_contain_text("has failed once")
    failing.get_by_role("link", name="Open group").first.click()
    row = page.get_by_role("row").filter(has_text="berlin")
    expect(row).to_contain_text("ValueError: the warehouse does not answer")
    expect(row).to_contain_text(str(head[0]))
    expect(card(page, "retrying")).to_have_text("1")
    assert effects("fragile") == []

    mended.touch()
    page.get_by_role("link", name="Retry", exact=True).click()
    expect(page.get_by_text("that will be retried now: 1.")).to_be_visible()
    page.get_by_role("button", name="Retry waiting messages").click()
    expect(page.locator(".messagelist")).to_contain_text("that are due now: 1.")
    expect(page.get_by_text("No unsettled messages.")).to_be_visible()
    expect(card(page, "backlog")).to_have_text("0")
    assert [number for _, _, number in effects("fragile")] == [1, 2]
    page.get_by_role("link", name="Overview").last.click()
    all_is_well(page)


def test_an_abandoned_group_is_dropped(desk: Desk, start: Start):
    start("calm")
    abandoned = GroupRef("abandoned", "b.calm")
    groups.register(USING, abandoned, mode="ordered", start="earliest")
    publish_many("b.calm", (Message({"n": n}, key="k") for n in range(3)))
    wait_for(lambda: len(effects("calm")) == 3)
    page = desk.open()
    found = problem(page, "No live subscribers for abandoned/b.calm; 3 messages are waiting")
    expect(found).to_be_visible()
    found.get_by_role("link", name="Open group").click()
    page.get_by_text("More…", exact=True).click()
    page.get_by_role("link", name="Drop group").click()
    preview = page.locator(".mq-preview")
    expect(preview).to_contain_text("Messages that GC keeps only for this group, and may delete afterwards: 3")
    expect(preview).to_contain_text("This cannot be undone.")
    # Nothing is done by looking, nor by going back.
    page.get_by_role("link", name="Back").click()
    expect(page.get_by_role("heading", name="Group abandoned/b.calm")).to_be_visible()
    assert groups.find(USING, abandoned) is not None
    page.get_by_text("More…", exact=True).click()
    page.get_by_role("link", name="Drop group").click()
    page.get_by_role("button", name="Drop group").click()
    expect(page.get_by_text("The group abandoned/b.calm is dropped.")).to_be_visible()
    all_is_well(page)
    assert list(ConsumerGroup.objects.values_list("consumer_group", flat=True)) == ["calm"]
    assert LogEntry.objects.get().change_message == "The group abandoned/b.calm is dropped."


def test_pause_resume_and_seek_while_messages_flow(desk: Desk, start: Start):
    start("calm")
    with flow("b.calm") as published:
        wait_for(lambda: len(effects("calm")) >= 5)
        page = desk.open("group/?group=calm&topic=b.calm")
        page.get_by_role("link", name="Pause", exact=True).click()
        page.get_by_label("Reason, for the audit log").fill("the warehouse moves")
        page.get_by_role("button", name="Pause group").click()
        expect(page.get_by_text("calm/b.calm is paused.")).to_be_visible()
        expect(card(page, "in flight")).to_have_text("0")
        handled = Effect.objects.count()
        # Only the sequencer goes on: the lag grows before the operator's eyes.
        expect(card(page, "backlog")).to_have_text(re.compile(r"^([5-9]|\d\d+)$"))
        lag = int(card(page, "backlog").inner_text())
        wait_for(lambda: int(card(page, "backlog").inner_text()) > lag)
        assert Effect.objects.count() == handled
        page.get_by_role("link", name="Resume", exact=True).click()
        page.get_by_role("button", name="Resume group").click()
        expect(page.get_by_role("link", name="Pause", exact=True)).to_be_visible()
        wait_for(lambda: Effect.objects.count() > handled + lag)
    expect(card(page, "backlog")).to_have_text("0")
    wait_for(lambda: Effect.objects.count() == len(published))
    assert Operation.objects.get(action="pause").reason == "the warehouse moves"

    offsets = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    page.get_by_text("More…", exact=True).click()
    page.get_by_role("link", name="Seek").click()
    page.get_by_label("Continue from").select_option("offset")
    page.get_by_label("Offset", exact=True).fill(str(offsets[2]))
    page.get_by_role("button", name="Preview").click()
    again = page.get_by_text(re.compile(r"Settled messages that will be replayed: \d+\."))
    number = int(re.sub(r"\D", "", again.inner_text()))
    assert number == len(offsets) - 2
    page.get_by_role("button", name="Seek").click()
    expect(
        page.get_by_text(f"calm/b.calm continues with the first message at or after offset {offsets[2]}.")
    ).to_be_visible()
    wait_for(lambda: Effect.objects.count() >= len(published) + number)
    page.reload()
    expect(card(page, "backlog")).to_have_text("0")
    assert Effect.objects.count() == len(published) + number
    sequence()


def test_dead_letters_are_redriven_and_discarded(desk: Desk, start: Start, tmp_path: Path):
    mended = tmp_path / "mended"
    start("mortal")
    publish_many("b.mortal", (Message({"n": n, "mended": str(mended)}, key=f"k{n}") for n in range(5)))
    page = desk.open()
    given_up = problem(page, "mortal/b.mortal has dead-lettered messages: 5 in b.mortal_dlq")
    expect(given_up).to_be_visible()
    given_up.get_by_role("link", name="Open dead letters").click()
    kind = page.locator(".mq-kinds tbody").get_by_role("row").filter(has_text="ValueError: there is no such customer")
    expect(kind).to_have_count(1)
    kind.get_by_role("link", name="List 5 dead letters: ").click()
    letters = page.locator("tbody").filter(has=page.get_by_role("checkbox")).get_by_role("row")
    expect(letters).to_have_count(5)
    dead = QueueMessage.objects.filter(topic="b.mortal_dlq").order_by("-offset")
    newest_first = [json.loads(bytes(one.payload))["n"] for one in dead]
    letters.nth(0).get_by_role("checkbox").check()
    letters.nth(1).get_by_role("checkbox").check()
    page.get_by_role("button", name="Discard selected").click()
    expect(page.get_by_text("that will be deleted: 2.")).to_be_visible()
    page.get_by_label("Reason, for the audit log").fill("customers of a test")
    page.get_by_role("button", name="Discard selected dead letters").click()
    expect(page.get_by_text("Dead letters deleted: 2.")).to_be_visible()
    expect(letters).to_have_count(3)
    assert effects("mortal") == []

    # One is looked at, with its payload and traceback, and sent back by itself; then the rest.
    mended.touch()
    letters.nth(0).get_by_role("rowheader").get_by_role("link").click()
    expect(page.locator("pre").filter(has_text="ValueError: there is no such customer")).to_be_visible()
    expect(page.locator("pre").filter(has_text=f'"n": {newest_first[2]}')).to_be_visible()
    page.get_by_role("link", name="Redrive", exact=True).click()
    page.get_by_role("button", name="Redrive selected dead letters").click()
    expect(page.get_by_text("Dead letters redriven: 1.")).to_be_visible()
    page.get_by_role("link", name="All dead letters").click()
    page.get_by_role("link", name="Redrive all").click()
    expect(page.get_by_text("each for the group that failed it: 2.")).to_be_visible()
    page.get_by_role("button", name="Redrive all matching dead letters").click()
    expect(page.get_by_text("Dead letters redriven: 2.")).to_be_visible()
    # What was sent back waits in the outbox first: no lag is no proof that it was handled.
    wait_for(lambda: len(effects("mortal")) == 3)
    page.get_by_role("link", name="Overview").last.click()
    expect(card(page, "dead letters")).to_have_text("0")
    expect(card(page, "backlog")).to_have_text("0")
    all_is_well(page)
    assert sorted(number for _, _, number in effects("mortal")) == sorted(newest_first[2:])
    assert Operation.objects.get(action="discard").reason == "customers of a test"


def test_a_scheduled_message_is_delivered_now_and_another_cancelled(desk: Desk, start: Start):
    start("calm")
    publish("b.calm", {"n": 1}, key="early", delay=3600)
    publish("b.calm", {"n": 2}, key="never", delay=7200)
    page = desk.open("scheduled/")
    early, never = (page.get_by_role("row").filter(has_text=key) for key in ("early", "never"))
    early.get_by_role("checkbox").check()
    page.get_by_role("button", name="Deliver selected now").click()
    page.locator("input[name=confirmed]").click()
    expect(early).to_have_count(0)
    never.get_by_role("checkbox").check()
    page.get_by_role("button", name="Cancel selected").click()
    page.locator("input[name=confirmed]").click()
    expect(page.get_by_text("No messages are scheduled.")).to_be_visible()
    wait_for(lambda: [number for _, _, number in effects("calm")] == [1])
