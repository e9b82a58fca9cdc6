#!/usr/bin/env python3
"""Take screenshots of every page of the dashboard while the example project is running.

Real subscribers handle the example's commits. One subscriber was killed, one group has no subscribers, the largest
commits are dead letters, and some messages are scheduled. Only the past in the charts is generated.

    tools/servers.py run mariadb -- .venv/bin/python tools/screenshots.py

Each page is taken in light and dark, at the width of a desktop and of a phone: ``overview-dark-390.png``. Without
DATABASE_URL, it uses SQLite in a temporary folder. The database must not contain messages.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))
import servers  # beside this file

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = "/admin/django_mysqlqueue/dashboard/"
WIDTHS = {1280: 1500, 390: 1800}
"""Width of a page → maximum height of its screenshot, in pixels."""
SCHEMES = ("light", "dark")
FIRST, RATE = 300, 60
"""Number of events that are published at once, and number per second from then on."""
STALLED = 65
"""Seconds after which the dashboard reports an abandoned group and a killed subscriber as problems, with a margin."""
LIMIT_KB = 200
"""Maximum size of a screenshot for the documentation, in kilobytes."""


def wait_for(condition: Callable[[], bool], what: str, timeout: float = 180) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"Timeout after {timeout:.0f} s while waiting for {what}")
        time.sleep(0.2)


# -- the queue ----------------------------------------------------------------


@contextlib.contextmanager
def queue_at_work(folder: Path) -> Iterator[dict[str, str]]:
    """Run subscribers and publishers. Yield the address of each page, by the name of its screenshot."""
    from django_mysqlqueue.service import groups
    from django_mysqlqueue.service.refs import GroupRef
    from example_project.commits.demo.processes import Subscribers
    from example_project.commits.events import TOPIC, read_events
    from example_project.commits.publishing import store
    from example_project.paths import EVENTS_FILE

    groups.register("default", GroupRef("search-index", TOPIC), mode="ordered", start="earliest")
    schedule()
    events = read_events(EVENTS_FILE)
    with Subscribers(folder, {**os.environ, "DEBUG": "0"}) as subscribers:
        started = [subscribers.start() for _ in range(3)]
        wait_for(lambda: all(one.is_ready for one in started), "the subscribers' start")
        began = time.monotonic()
        store(list(itertools.islice(events, FIRST)))
        doomed = started.pop()
        wait_for(lambda: doomed_holds(doomed.popen.pid), "the first leases")
        doomed.popen.send_signal(signal.SIGKILL)
        doomed.popen.wait()
        with flow(lambda: store(list(itertools.islice(events, 1)))):
            print(f"Waiting {STALLED} s until the dashboard reports the stalled group.", flush=True)
            time.sleep(max(0.0, STALLED - (time.monotonic() - began)))
            make_history()
            yield addresses()


def doomed_holds(pid: int) -> bool:
    """Return whether the subscriber with this pid has a lease."""
    from django_mysqlqueue.models import PartitionLease, SubscriberHeartbeat

    names = {row.subscriber_name for row in SubscriberHeartbeat.objects.all() if row.info.get("pid") == pid}
    return PartitionLease.objects.filter(leased_by__in=names).exists()


def schedule() -> None:
    """Publish some scheduled messages."""
    from django_mysqlqueue import publish

    newsletters = (("digest", 35), ("digest", 95), ("reminder", 12), ("reminder", 240), ("report", 1440))
    for reader, (kind, minutes) in enumerate(newsletters, 4711):
        payload = {"kind": kind, "reader": reader, "language": "en"}
        publish("newsletters", payload, key=f"reader-{reader}", delay=minutes * 60)


@contextlib.contextmanager
def flow(publish_one: Callable[[], None]) -> Iterator[None]:
    """Publish at a steady rate in a thread."""
    from django.db import connections

    stop = threading.Event()

    def work() -> None:
        try:
            while not stop.wait(1 / RATE):
                publish_one()
        finally:
            connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def make_history() -> None:
    """Create rollups of the past six hours and seven days, as subscribers that sample backlogs write them.

    Traffic varies. Some time ago, the handlers of one group were slow and failed: its backlog grew and was processed.
    The minutes in which the subscribers started are replaced: their latencies are those of a busy machine.
    """
    from django_mysqlqueue.models import ConsumerGroup, Rollup
    from django_mysqlqueue.service.rollups import COUNTS, HOUR, MINUTE, Tally
    from django_mysqlqueue.sql.session import Session
    from example_project.commits.demo.run import GROUPS
    from example_project.commits.events import TOPIC

    chance = random.Random(7)
    now = Session("default").now()
    minute = now // (MINUTE * 1000) * MINUTE * 1000
    Rollup.objects.filter(grain=MINUTE, bucket_at__lt=minute, consumer_group__in=GROUPS, topic=TOPIC).delete()
    # Rates are of the last five minutes, but at most since the registration.
    ConsumerGroup.objects.filter(consumer_group__in=GROUPS, topic=TOPIC).update(registered_at=now - 168 * HOUR * 1000)
    rows = []
    for grain, last, places, slow in ((MINUTE, 1, 360, range(24, 34)), (HOUR, 2, 168, range(9, 12))):
        for group in GROUPS:
            backlog = 0
            for place in range(places, last - 1, -1):
                is_slow = group == "review" and place in slow
                wave = 1 + 0.4 * math.sin(place / 7) + chance.uniform(-0.08, 0.08)
                entered = round(RATE * grain * wave)
                settled = entered // 2 if is_slow else entered + min(backlog, entered // 6)
                backlog += entered - settled
                tally = Tally()
                for _ in range(100):
                    tally.acked(round(chance.lognormvariate(7.5 if is_slow else 3.2, 0.7)))
                tally.latency = [count * settled // 100 for count in tally.latency]
                if group == "review":
                    tally.failed = round(settled * (0.06 if is_slow else 0.002))
                    tally.dead_lettered = tally.failed // 12
                at = (now // (grain * 1000) - place) * grain * 1000
                sample = backlog + chance.randrange(5, 60)
                rows.append(
                    Rollup(
                        grain=grain,
                        bucket_at=at,
                        consumer_group=group,
                        topic=TOPIC,
                        sampled_at=at,
                        backlog=sample,
                        oldest_ms=sample * 1000 // RATE,
                        entered=entered,
                        entered_minutes=grain // MINUTE,
                        **dict(zip(COUNTS, tally.counts(), strict=True)),
                    )
                )
    Rollup.objects.bulk_create(rows)


def addresses() -> dict[str, str]:
    """Return the addresses of the pages by the names of their screenshots."""
    from django_mysqlqueue.models import QueueMessage
    from example_project.commits.events import TOPIC

    dead_letter = (
        QueueMessage.objects.filter(topic=f"{TOPIC}_dlq").order_by("-offset").values("offset", "original_offset")[0]
    )
    abandoned = f"group=search-index&topic={TOPIC}"
    return {
        "overview": "",
        "overview-day": "?span=day",
        "group": f"group/?group=review&topic={TOPIC}&range=1h",
        "abandoned": f"group/?{abandoned}",
        "inflight": "inflight/",
        "deadletters": "deadletters/",
        "deadletter": f"deadletter/?offset={dead_letter['offset']}",
        "scheduled": "scheduled/",
        "offsets": f"offsets/?group=statistics&topic={TOPIC}",
        "messages": f"messages/?topic={TOPIC}",
        "message": f"message/?offset={dead_letter['original_offset']}",
        "seek": f"do/seek/?{abandoned}&target=earliest",
        "drop": f"do/drop/?{abandoned}",
        "redrive": f"do/redrive/?topic={TOPIC}_dlq&upto={dead_letter['offset']}",
    }


# -- the screenshots ----------------------------------------------------------


@contextlib.contextmanager
def site(folder: Path) -> Iterator[str]:
    """Serve the example's site. Yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "site.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "manage.py"), "runserver", "--noreload", f"127.0.0.1:{port}"],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        wait_for(lambda: answers(port), "the site")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def session_cookie() -> tuple[str, str]:
    """Create a superuser. Return the name and the value of a session cookie for it."""
    from django.conf import settings
    from django.contrib.auth.models import User
    from django.test import Client

    client = Client()
    client.force_login(User.objects.create_superuser("demo"))
    return settings.SESSION_COOKIE_NAME, client.cookies[settings.SESSION_COOKIE_NAME].value


def take(browser: Browser, origin: str, cookie: tuple[str, str], pages: dict[str, str], out: Path) -> None:
    """Take a screenshot of every page in every color scheme and width."""
    for width, scheme in itertools.product(WIDTHS, SCHEMES):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        context.add_cookies([{"name": cookie[0], "value": cookie[1], "url": origin}])
        # Hide the admin's sidebar, which only takes space.
        context.add_init_script("localStorage.setItem('django.admin.navSidebarIsOpen', 'false')")
        page = context.new_page()
        for name, address in pages.items():
            answer = page.goto(f"{origin}{DASHBOARD}{address}")
            if answer is None or not answer.ok:
                raise SystemExit(f"{name}: {address} answered with status {answer and answer.status}")
            path = out / f"{name}-{scheme}-{width}.png"
            height = page.evaluate("document.documentElement.scrollHeight")
            clip = {"x": 0, "y": 0, "width": width, "height": min(height, WIDTHS[width])}
            page.screenshot(path=path, full_page=True, clip=clip)  # type: ignore[arg-type]
            size = path.stat().st_size / 1024
            print(f"{path}: {size:.0f} kB{', too large for the documentation' if size > LIMIT_KB else ''}", flush=True)
        context.close()


def main() -> int:
    servers.end_servers_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / ".test" / "screenshots",
        metavar="FOLDER",
        help="folder for the images (default: %(default)s)",
    )
    options = parser.parse_args()
    try:
        chromium = servers.browser()
    except servers.NotAvailable as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mysqlqueue-screenshots-") as name:
        folder = Path(name)
        os.environ.setdefault("DATABASE_URL", f"sqlite:///{folder}/db.sqlite3")
        os.environ["DJANGO_SETTINGS_MODULE"] = "screenshot_settings"
        paths = [str(ROOT / "tools"), str(ROOT)]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        sys.path[:0] = paths
        prepare()
        cookie = session_cookie()
        with site(folder) as origin, queue_at_work(folder) as pages:
            from playwright.sync_api import sync_playwright

            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
                take(browser, origin, cookie, pages, options.out)
                browser.close()
    return 0


def prepare() -> None:
    """Create the tables in an empty database.

    Raises:
        SystemExit: The database contains messages.
    """
    import django
    from django.core.management import call_command

    django.setup()
    from django_mysqlqueue.models import QueueMessage

    call_command("migrate", verbosity=0)
    if QueueMessage.objects.exists():
        raise SystemExit("This database contains messages. Set DATABASE_URL to an empty database.")


if __name__ == "__main__":
    sys.exit(main())
