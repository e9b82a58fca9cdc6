"""Parts of the dashboard's pages."""

from __future__ import annotations

from playwright.sync_api import Page


def card(page: Page, name: str):
    """The number on a card."""
    return page.locator(".mq-card").filter(has=page.get_by_text(name, exact=True)).locator("dd")
