"""The example project's page that starts a job and shows its progress."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import WAIT_MS
from tests.browser.examples import Example

pytestmark = pytest.mark.any_engine


@pytest.mark.timeout(240)
@pytest.mark.parametrize("example", ["wsgi"], indirect=True)
def test_a_page_shows_a_job_until_it_has_ended(example: Example, chromium: Browser):
    context = chromium.new_context()
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    example.publish(0, 300)
    page.goto(f"{example.url}jobs/")
    page.fill("#id_username", "demo")
    page.fill("#id_password", "demo")
    page.click("input[type=submit]")
    status = page.locator("#job-status")
    page.get_by_role("button", name="Start").click()
    expect(status).to_have_text("READY")
    cancelled = page.url
    page.get_by_role("button", name="Cancel").click()
    expect(status).to_have_text("FAILED")
    assert "was cancelled before it started" in page.locator("pre").inner_text()
    page.get_by_role("button", name="Start").click()
    expect(status).to_have_text("READY")
    assert page.url != cancelled
    subscriber = example.popen("runsubscriber", "--drain")
    try:
        expect(status).to_have_text("SUCCESSFUL", timeout=WAIT_MS)
        assert subscriber.wait(60) == 0
    finally:
        subscriber.kill()
    done = page.locator("progress")
    assert done.get_attribute("value") == done.get_attribute("max")
    loads: list[str] = []
    page.on("load", lambda _: loads.append(page.url))
    page.wait_for_timeout(2500)
    assert loads == [], "it no longer reloads itself"
    assert page.goto(f"{example.url}jobs/unknown/").status == 404
    context.close()
