"""Parts of the dashboard's pages."""

from __future__ import annotations

from playwright.sync_api import Page

FOCUSED = """() => {
  const one = document.activeElement;
  return (one.textContent || one.value || '').trim();
}"""


def card(page: Page, name: str):
    """The number on a card."""
    return page.locator(".mq-card").filter(has=page.get_by_text(name, exact=True)).locator("dd")


def tab_to(page: Page, name: str) -> None:
    """Presses Tab until what has this name has the focus."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUSED) == name:
            return
    raise AssertionError(f"Tab does not lead to {name!r}")
