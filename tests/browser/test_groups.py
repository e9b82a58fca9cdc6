"""The table of groups and the charts of a group in a browser: sorting, the sticky head, the crosshair."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import Rollup
from tests.browser.conftest import Desk, Open
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import Session

REFRESH_MS = 4000
BILLING = "group/?group=billing&topic=orders&range=15m"


@pytest.fixture
def charted(db: None) -> Sub:
    """Groups, of which one has a backlog: 0, 10, 20, … messages in the minutes before now, with a gap."""
    sub = Sub(
        handler("orders", "billing"),
        handler("orders", "order-" + "confirmation" * 6),
        handler("invoices", "a-consumer-group", rate="100/s", max_in_flight=20),
    )
    Sub(handler("mail", "newsletter"))
    publish_many("orders", (Message({"n": n}, key=f"customer-{n % 12:03}") for n in range(24)))
    sequence()
    sub.step()
    minute = Session(USING).now() // 60_000 * 60_000
    for ago in range(15):
        if ago != 5:
            Rollup.objects.create(
                grain=60,
                bucket_at=minute - ago * 60_000,
                consumer_group="billing",
                topic="orders",
                backlog=ago * 10,
                failed=ago,
            )
    return sub


def opened(desk: Desk, address: str) -> Page:
    """The page, whose time stands still."""
    desk.page.clock.install()
    desk.open(address)
    expect(desk.page.get_by_role("button", name="Pause refreshing")).to_be_visible()
    return desk.page


def refresh(page: Page) -> None:
    """Time passes, and the answer arrives."""
    with page.expect_response(lambda answer: answer.request.resource_type == "fetch"):
        page.clock.run_for(REFRESH_MS)


def test_the_head_of_the_groups_sorts_and_stays(desk: Desk, charted: Sub):
    page = desk.open("")
    table = page.locator(".mq-groups")
    head = table.get_by_role("columnheader", name="backlog")
    head.get_by_role("link").click()
    expect(page).to_have_url(re.compile("sort=-backlog"))
    expect(head).to_have_attribute("aria-sort", "descending")
    first = table.locator("tbody th a").first
    expect(first).to_have_text("billing")
    head.get_by_role("link").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    expect(first).not_to_have_text("billing")
    page.go_back()
    expect(head).to_have_attribute("aria-sort", "descending")
    page.set_viewport_size({"width": 1280, "height": 300})
    table.locator("tbody tr").last.scroll_into_view_if_needed()
    expect(head).to_be_in_viewport()


@pytest.mark.parametrize("width", [1280, 1600])
def test_no_figure_of_the_groups_is_cut_off(open_desk: Open, charted: Sub, width: int):
    Rollup.objects.update(acked=123_456, failed=12_345, filtered=123_456)
    page = open_desk(width=width, height=900).open("")
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
    cut = "() => [...document.querySelectorAll('.mq-groups th, .mq-groups td')]"
    cut += ".filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent)"
    assert page.evaluate(cut) == []


def values(page: Page, name: str) -> Any:
    return page.get_by_role("group", name=name, exact=True).locator(".mq-values")


def test_a_crosshair_follows_the_pointer_and_outlives_a_refresh(desk: Desk, charted: Sub):
    page = opened(desk, BILLING)
    expect(values(page, "Backlog")).to_have_text("")
    chart = page.locator("#mq-plot-backlog .mq-chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    left = box["width"] * 46 / 600
    step = (box["width"] - left) / 15

    def over(place: int) -> None:
        page.mouse.move(box["x"] + left + (place + 0.5) * step, box["y"] + box["height"] / 2)

    over(11)
    expect(values(page, "Backlog")).to_contain_text(re.compile(r"backlog [34]0"))
    expect(values(page, "Errors")).to_contain_text(re.compile(r"failed [34]"))
    said = values(page, "Backlog").inner_text()
    line = page.locator("#mq-plot-errors .mq-cross")
    expect(line).to_have_attribute("visibility", "visible")
    # What is there after the refresh is another element, with the same values.
    line.evaluate("line => { line.dataset.old = 'yes'; }")
    refresh(page)
    expect(page.locator("[data-old]")).to_have_count(0)
    expect(values(page, "Backlog")).to_have_text(said)
    expect(line).to_have_attribute("visibility", "visible")
    page.mouse.move(5, 5)
    expect(values(page, "Backlog")).to_have_text("")
    expect(line).to_have_attribute("visibility", "hidden")


def test_the_crosshair_by_keyboard(desk: Desk, charted: Sub):
    page = opened(desk, BILLING)
    plot = page.get_by_role("group", name="Backlog", exact=True)
    plot.focus()
    page.keyboard.press("Home")
    expect(values(page, "Backlog")).to_contain_text(re.compile("backlog 1[34]0"))
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    expect(values(page, "Backlog")).to_contain_text(re.compile("backlog (10|0)"))
    expect(values(page, "Backlog")).to_have_attribute("aria-live", "polite")
    expect(values(page, "Errors")).to_have_attribute("aria-live", "off")
    said = values(page, "Backlog").inner_text()
    refresh(page)
    expect(plot).to_be_focused()
    expect(values(page, "Backlog")).to_have_text(said)
    page.keyboard.press("ArrowLeft")
    expect(values(page, "Backlog")).to_contain_text(re.compile("backlog [12]0"))
    page.keyboard.press("Escape")
    expect(values(page, "Backlog")).to_have_text("")


def test_the_crosshair_by_touch(open_desk: Open, charted: Sub):
    desk = open_desk(width=390, height=844, has_touch=True)
    page = desk.open(BILLING)
    chart = page.locator("#mq-plot-errors .mq-chart")
    chart.tap()
    expect(values(page, "Errors")).to_contain_text("failed")
    expect(values(page, "Backlog")).to_contain_text("backlog")


def test_the_charts_without_a_script(open_desk: Open, charted: Sub):
    desk = open_desk(java_script_enabled=False)
    page = desk.open(BILLING)
    chart = page.get_by_role("img", name="Backlog over time: backlog")
    expect(chart).to_be_visible()
    assert chart.locator("text").count() == 6
    page.get_by_text("Values as a table").click()
    row = page.locator("#mq-values tbody tr").first
    expect(row).to_contain_text("0")
    page.get_by_role("link", name="24 h").click()
    expect(page.locator("#mq-values tbody tr")).to_have_count(24)
