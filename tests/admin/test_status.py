"""The state of the queue: above the dashboard's pages, on the admin's index, and read once for several viewers."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
from django.db import OperationalError, connection
from django.template import Context, Template
from django.test.utils import CaptureQueriesContext
from django.utils import timezone, translation

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.admin import pages, status
from django_mysqlqueue.admin.causes import CAUSES, SYMPTOMS, link_of
from django_mysqlqueue.admin.shared import SharedReads, shared
from django_mysqlqueue.inspection import PAGES, Cause, Problem, QueueStatus, find_problems, get_overview
from django_mysqlqueue.inspection.bounds import STALL_TIMES
from django_mysqlqueue.inspection.problem import Kind
from django_mysqlqueue.options.backoff import Backoff
from tests.support.dashboard import ROOT, confirm, page
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import Count, GroupRef, groups

pytestmark = [pytest.mark.usefixtures("db"), pytest.mark.still_clock]

INDEX = "/admin/"


@pytest.fixture
def sharing(monkeypatch):
    """Values are shared as in production, but for longer: a busy machine takes its time for a page."""
    monkeypatch.setattr(SharedReads, "SECONDS", 60.0)
    shared.clear()
    yield
    shared.clear()


def abandoned(number=1):
    for one in range(number):
        groups.register(USING, GroupRef(f"g{one}", "t"), mode="ordered", start="earliest")
    publish_many("t", range(3))
    sequence()


def test_the_index_of_the_admin_reads_nothing_of_the_queue(client):
    """The browser requests the state afterwards: a slow database does not delay the index."""
    with CaptureQueriesContext(connection) as captured:
        text = client.get(INDEX).content.decode()
    assert f'data-state-of="{ROOT}"' in text
    assert f'<a href="{ROOT}">Open dashboard</a>' in text
    assert not [query for query in captured if "queue_" in query["sql"]]
    assert client.get("/deep/er/ops/").content.decode().count('"/deep/er/ops/django_mysqlqueue/dashboard/"') >= 3


def test_the_index_shows_it_to_those_who_may_view_the_dashboard(make_client):
    assert "data-state-of" not in make_client("view_user").get(INDEX).content.decode()
    assert "data-state-of" in make_client("view_dashboard").get(INDEX).content.decode()


def test_the_index_works_with_an_invalid_setting(client, settings):
    settings.MYSQLQUEUE = {"HEALTH": {"NONSENSE": 1}}
    assert client.get(INDEX).status_code == 200


def test_the_tag_shows_nothing_without_the_request():
    """TEMPLATES need not have the context processor."""
    assert Template("{% load mysqlqueue_admin %}{% queue_status %}").render(Context()).strip() == ""


def test_the_state_of_several_databases():
    found = {name: QueueStatus(state, f"{state}!") for name, state in (("a", "ok"), ("b", "stopped"))}
    assert status.worst(found) == ("b", QueueStatus("degraded", "b: stopped!"))
    assert status.worst({"b": found["b"]}) == ("b", QueueStatus("stopped", "b: stopped!"))
    assert status.worst({"a": found["a"], "c": found["a"]})[1].text == "2 databases. No problems found."


def test_of_several_databases_with_a_problem_the_one_with_most_harm_is_named():
    def degraded(number, severity=1):
        problem = Problem(severity, "dead_letters", "", GroupRef("g", "t"), failed=Count(number))
        return QueueStatus("degraded", f"{number} dead letters.", cause=Cause((problem,), "", ""))

    found = {"a": degraded(12), "b": degraded(899), "c": degraded(100)}
    assert status.worst(found) == ("b", replace(found["b"], text="b: 899 dead letters."))
    assert status.worst({**found, "d": degraded(1, severity=0)})[0] == "d"


def test_a_note_of_one_of_several_databases_is_not_denied():
    note = Cause((Problem(2, "no_subscriber", "", GroupRef("g", "t")),), "No subscriber is running.", "")
    found = {"a": QueueStatus("ok", "fine"), "b": QueueStatus("ok", "fine", cause=note)}
    assert status.worst(found)[1].text == "2 databases. For information: b: No subscriber is running."


def test_causes_beyond_seven_are_folded(client, monkeypatch):
    for number in range(CAUSES + 2):
        publish_many(f"typo{number}", range(2))
    abandoned()
    assert [len(one.cause.problems) for one in client.get(ROOT).context["causes"]] == [CAUSES + 2, 1], "by cause"
    monkeypatch.setattr("django_mysqlqueue.admin.causes.CAUSES", 1)
    answer = client.get(ROOT)
    assert "1 more problem<" in answer.content.decode()
    assert (len(answer.context["causes"]), len(answer.context["more_causes"])) == (1, 1)


def test_symptoms_beyond_fifty_are_counted(client, clock, monkeypatch):
    monkeypatch.setattr("django_mysqlqueue.admin.causes.SYMPTOMS", SYMPTOMS - 1)
    sub = Sub(handler(function=lambda delivery: delivery.nack(), backoff=Backoff(36_000, jitter=0), max_attempts=None))
    publish_many("t", [Message(n, key=f"k{n}") for n in range(SYMPTOMS)])
    sub.settle()
    sub.poller.write_rollups()
    clock.advance(100)
    sub.heart.beat()
    (cause,) = client.get(ROOT).context["causes"]
    assert (len(cause.symptoms), cause.more_symptoms) == (SYMPTOMS - 1, 1), "the headline is none of them"
    assert "1 more is not listed." in page(client)


@pytest.mark.parametrize("task", [None, "shop.tasks.geocode"])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_link_has_the_title_of_its_page(kind, task):
    titles = {page.name: str(page.title).lower() for page in pages.PAGES}
    dashboard = SimpleNamespace(url=lambda name, **query: name)
    name, action = link_of(dashboard, Problem(0, kind, "", GroupRef("g", "t"), task=task))
    assert name in ("", "changelist", "recurring") or action.partition(" (")[0] == f"Open {titles[name]}"


@pytest.mark.parametrize(
    ("number", "action", "link"),
    [
        (1, "Open message", "message/?offset="),
        (2, "Open dead letters (retrying)", "deadletters/?state=retrying&group=g&topic=t"),
    ],
)
def test_failed_messages_of_a_group_lead_to_their_errors(client, clock, number, action, link):
    """There, all are retried at once. A single one leads to its own page."""
    sub = Sub(handler(function=lambda delivery: delivery.nack(), backoff=Backoff(36_000, jitter=0), max_attempts=None))
    publish_many("t", [Message(n, key=f"k{n}") for n in range(number)])
    sub.settle()
    clock.advance(100)
    sub.heart.beat()
    (cause,) = client.get(ROOT).context["causes"]
    assert (cause.cause.kind, len(cause.cause.problems), cause.action) == ("stuck", number, action)
    assert cause.link.startswith(f"{ROOT}{link}")
    assert client.get(cause.link).status_code == 200


def test_errors_are_redacted(client, clock, settings):
    settings.MYSQLQUEUE = {"REDACT": "tests.admin.test_status.hide"}

    def fails(delivery):
        raise ValueError("card 4111 refused")

    sub = Sub(handler(function=fails, backoff=Backoff(36_000, jitter=0), max_attempts=None))
    publish_many("t", range(3))
    sub.settle()
    sub.poller.write_rollups()
    clock.advance(100)
    sub.heart.beat()
    text = page(client)
    assert "ValueError: card (hidden) refused" in text
    assert "4111" not in text


def hide(text, *, topic, kind):
    assert (topic, kind) == ("t", "error")
    return text.replace("4111", "(hidden)")


def test_ten_viewers_read_the_state_once(client, monkeypatch, sharing, clock):
    read, whole = [], status.get_overview

    def counting(**options):
        read.append(options)
        return whole(**options)

    monkeypatch.setattr(status, "get_overview", counting)
    abandoned()
    for _ in range(10):
        assert client.get(ROOT).status_code == 200
    assert len(read) == 1
    assert "g0/t is paused" not in page(client)
    assert confirm(client, "pause", group="g0", topic="t")
    assert "g0/t is paused" in page(client), "an operation is seen at once"
    assert len(read) == 2
    monkeypatch.setattr(SharedReads, "SECONDS", 0.0)
    page(client)
    assert len(read) == 3


def test_what_is_shared_is_that_of_one_database_language_and_zone(monkeypatch, sharing):
    def where():
        return translation.get_language(), timezone.get_current_timezone_name()

    monkeypatch.setattr(status, "get_overview", lambda **options: SimpleNamespace(of=options["using"], now=1))
    monkeypatch.setattr(status, "with_samples", lambda overview: overview)
    monkeypatch.setattr(status, "find_problems", lambda overview, **_: where())
    monkeypatch.setattr(status, "state_of", lambda overview, problems: (overview.of, *problems))

    def read(alias, language, zone):
        with translation.override(language), timezone.override(zone):
            return status.read_shared(alias, PAGES, STALL_TIMES)

    wanted = [(alias, language, zone) for alias in "ab" for language in ("en", "de") for zone in ("UTC", "Asia/Tokyo")]
    assert [read(*one) for one in wanted] == wanted


def test_problems_are_those_of_the_overview_that_is_shared(client, monkeypatch, sharing):
    """The list of topics needs no problems. A page that shows them does not read the groups again."""
    read, found = [], []
    monkeypatch.setattr(status, "get_overview", lambda **options: read.append(1) or get_overview(**options))
    monkeypatch.setattr(
        status,
        "find_problems",
        lambda overview, **options: found.append(overview) or find_problems(overview, **options),
    )
    page(client, "offsets")
    assert (len(read), len(found)) == (1, 0)
    page(client)
    page(client)
    assert (len(read), len(found)) == (1, 1)
    abandoned()
    assert confirm(client, "pause", group="g0", topic="t")
    page(client)
    assert (len(read), len(found)) == (2, 2)


def test_problems_of_an_earlier_overview_are_not_used(monkeypatch, sharing):
    times = iter((1, 2))
    monkeypatch.setattr(status, "get_overview", lambda **_: SimpleNamespace(now=next(times)))
    monkeypatch.setattr(status, "with_samples", lambda overview: overview)
    monkeypatch.setattr(status, "find_problems", lambda overview, **_: overview.now)
    monkeypatch.setattr(status, "state_of", lambda overview, problems: (overview.now, problems))
    assert status.read_shared("a", PAGES, STALL_TIMES) == (1, 1)
    monkeypatch.setattr(shared, "_entries", {key: one for key, one in shared._entries.items() if key[0] != "overview"})
    assert status.read_shared("a", PAGES, STALL_TIMES) == (2, 2)


# -- values that several requests share ----------------------------------------


def test_requests_wait_for_the_one_that_reads():
    values = SharedReads()
    reading, go_on = threading.Event(), threading.Event()
    read = []

    def slow():
        read.append(1)
        reading.set()
        go_on.wait(10)
        return object()

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(values.get, "a", slow)
        assert reading.wait(10)
        others = [pool.submit(values.get, "a", slow) for _ in range(7)]
        time.sleep(0.05)
        go_on.set()
        assert len({id(one.result(10)) for one in (first, *others)}) == 1
    assert len(read) == 1


def test_a_failure_is_for_those_that_waited_and_not_kept():
    values = SharedReads()

    def fail():
        raise OperationalError("gone")

    with pytest.raises(OperationalError, match="gone"):
        values.get("a", fail)
    assert values.get("a", lambda: 1) == 1


def test_old_values_are_forgotten(monkeypatch):
    values = SharedReads()
    monkeypatch.setattr(SharedReads, "SECONDS", 3600.0)
    assert [values.get("a", lambda: 1), values.get("a", lambda: 2)] == [1, 1]
    values.clear()
    assert values.get("a", lambda: 3) == 3
    monkeypatch.setattr(SharedReads, "MOST", 1)
    assert [values.get("b", lambda: 4), values.get("b", lambda: 5)] == [4, 5], "no room"
    monkeypatch.setattr(SharedReads, "SECONDS", 0.0)
    assert values.get("b", lambda: 6) == 6
    assert list(values._entries) == ["b"]
