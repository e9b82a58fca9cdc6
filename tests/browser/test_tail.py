"""The example project's page that follows a topic, on its own servers, through a restart."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import WAIT_MS
from tests.browser.examples import Example

pytestmark = pytest.mark.any_engine


@pytest.mark.promise("Tails")
@pytest.mark.timeout(240)
def test_a_page_follows_a_topic_through_a_restart_of_the_server(example: Example, chromium: Browser):
    context = chromium.new_context()
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    example.publish(0, 3)
    page.goto(f"{example.url}live/")
    page.fill("#id_username", "demo")
    page.fill("#id_password", "demo")
    page.click("input[type=submit]")
    status = page.locator("#status")
    expect(status).to_have_text("Live", timeout=WAIT_MS)
    assert page.locator("#commits tr").count() == 0, "only what is new"

    def offsets() -> list[int]:
        return [int(text) for text in page.locator("#commits tr td:first-child").all_inner_texts()][::-1]

    example.publish(3, 8)
    expect(page.locator("#commits tr")).to_have_count(5, timeout=WAIT_MS)
    assert offsets() == [4, 5, 6, 7, 8]
    example.kill()
    expect(status).to_have_text("Connection lost. Connecting again …", timeout=WAIT_MS)
    example.publish(8, 15)
    example.start()
    expect(page.locator("#commits tr")).to_have_count(12, timeout=WAIT_MS)
    assert offsets() == list(range(4, 16)), "nothing twice, nothing missing"
    expect(status).to_have_text("Live")
    first = page.locator("#commits tr").last.inner_text()
    assert re.fullmatch(r"4\s+\S+\s+\d+\s+[0-9a-f]{10}\s+\d+", first)
    assert wrong == []
    context.close()
