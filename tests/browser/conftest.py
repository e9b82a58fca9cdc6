"""Fixtures: Chromium, a site, somebody who is logged in, subscriber processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.test import Client
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from django_mysqlqueue.admin.pages import base
from django_mysqlqueue.inspection.bounds import StallTimes
from tests.browser.examples import Example
from tests.browser.site import Site
from tests.support.processes import SHORT, Worker, environment, wait_for

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
"""Debian's; another one by the environment."""
WAIT_MS = 40_000
"""How long a test waits for what must appear."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        reason = f"There is no {CHROMIUM}: install Debian's chromium, or name one in CHROMIUM."
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    # Of a module, not of the session: while it is open an event loop counts as running in this
    # thread, which asynchronous tests would trip over, and Django refuses queries there.
    with pytest.MonkeyPatch.context() as patch, sync_playwright() as playwright:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def site(db: None, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    settings.ROOT_URLCONF = "tests.browser.site"
    settings.ALLOWED_HOSTS = ["127.0.0.1"]
    settings.MIDDLEWARE = [
        "tests.browser.site.strict_policy",
        *settings.MIDDLEWARE,
        "django.middleware.csrf.CsrfViewMiddleware",
    ]
    # A subscriber is as soon silent for the pages as for the others.
    settings.MYSQLQUEUE = SHORT
    # What stands still is a problem at once: a person waits a minute for that, a test does not.
    monkeypatch.setattr(base.Page, "stall_times", StallTimes(stuck=0.5, started=0.5))
    site = Site()
    yield site
    site.stop()


@pytest.fixture
def user(db: None) -> User:
    User.objects.all().delete()
    return User.objects.create_superuser("ada", password="lovelace")  # noqa: S106


class Desk:
    """A person at the dashboard: a page, and what the browser complained of."""

    def __init__(self, site: Site, page: Page) -> None:
        self.site = site
        self.page = page
        self.complaints: list[str] = []
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.text} ({message.location.get('url')})")

    def open(self, page: str = "") -> Page:
        self.page.goto(self.site.url(page))
        return self.page

    def forget_statuses(self) -> None:
        """Forget the complaints about pages that are answered with an error status, for tests that open such pages."""
        self.complaints[:] = [text for text in self.complaints if "responded with a status of" not in text]


Open = Callable[..., Desk]
Start = Callable[..., Worker]


@pytest.fixture
def open_desk(chromium: Browser, site: Site, user: User) -> Iterator[Open]:
    """Makes desks, logged in unless told otherwise; at the end nobody may have complained."""
    desks: list[Desk] = []

    def make(*, login: bool = True, width: int = 1280, height: int = 900, **options: Any) -> Desk:
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(WAIT_MS)
        if login:
            client = Client()
            client.force_login(user)
            name = django_settings.SESSION_COOKIE_NAME
            context.add_cookies([{"name": name, "value": client.cookies[name].value, "url": site.origin}])
        desk = Desk(site, context.new_page())
        desks.append(desk)
        return desk

    yield make
    for desk in desks:
        desk.page.context.close()
    assert [text for desk in desks for text in desk.complaints] == []


@pytest.fixture
def desk(open_desk: Open) -> Desk:
    return open_desk()


@pytest.fixture
def start(db: None, tmp_path: Path) -> Iterator[Start]:
    """Starts a subscriber of the groups that are named, and returns it when it works."""
    workers: list[Worker] = []

    def begin(*groups: str) -> Worker:
        env = environment() | {"DJANGO_SETTINGS_MODULE": "tests.browser.settings"}
        env.pop("DJANGO_ALLOW_ASYNC_UNSAFE", None)
        names = [argument for group in groups for argument in ("--group", group)]
        worker = Worker(tmp_path, *names, whole_env=env)
        workers.append(worker)
        wait_for(worker.is_ready, worker)
        return worker

    yield begin
    for worker in workers:
        worker.end()


@pytest.fixture(params=["wsgi", "asgi"])
def example(request, tmp_path):
    found = Example(tmp_path, request.param)
    found.manage("migrate", "-v", "0")
    found.manage("demouser")
    found.start()
    yield found
    found.kill()
