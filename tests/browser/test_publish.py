"""A test message is published in a browser, with and without JavaScript."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from django_mysqlqueue.models import Operation, OutboxMessage
from tests.browser.conftest import WAIT_MS, Open
from tests.support.handlers import Recorder
from tests.support.harness import Sub, handler

expect.set_options(timeout=WAIT_MS)


@pytest.mark.parametrize("javascript", [True, False])
def test_a_double_click_publishes_what_was_shown_once(open_desk: Open, javascript: bool, db: None):
    got = Recorder()
    sub = Sub(handler("orders", "billing", got))
    page = open_desk(java_script_enabled=javascript).open("group/?group=billing&topic=orders")
    page.get_by_text("More…", exact=True).click()
    page.get_by_role("link", name="Publish a test message").click()
    expect(page.get_by_label("Topic")).to_have_value("orders")
    page.get_by_label("Payload", exact=True).fill('{\n  "n": \n}')
    page.get_by_label("Metadata").fill('{"region": "eu"}')
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_text("Invalid JSON: Expecting value (line 3, column 1).")).to_be_visible()
    expect(page.get_by_label("Metadata")).to_have_value('{"region": "eu"}')
    page.get_by_label("Payload", exact=True).fill('{"n": 1}')
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_text("billing/orders will receive it")).to_be_visible()
    page.get_by_role("button", name="Publish a test message").dblclick()
    expect(page.get_by_text("to the topic orders")).to_be_visible()
    expect(page.get_by_role("heading", name="Group billing/orders")).to_be_visible()
    assert {one.message_id for one in OutboxMessage.objects.all()} == {Operation.objects.latest("id").detail[3:]}
    sub.settle()
    assert got.payloads == [{"n": 1}]
