"""``queuestatus``, ``queuehealth``, the metrics and the dashboard say the same of the same state.

Each state is staged once and asked for in five ways, of which each is compared with what the state is. None of them is
compared with a function of the package.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import Client
from django.urls import path
from prometheus_client.parser import text_string_to_metric_families

from django_mysqlqueue import metrics
from tests.support.queue_states import SLACK, STATES, Group, Problem, Stage, State, command

urlpatterns = [path("admin/", admin.site.urls), path("metrics/", metrics.view)]
DASHBOARD = "/admin/django_mysqlqueue/dashboard/"
ALARMING_NOTES = {"groupless"}
"""Kinds that make the queue unhealthy though messages are not stalled."""


def subject(found: Mapping[str, Any]) -> str:
    return f"{found['group']}/{found['topic']}" if found["group"] else ""


def queuestatus() -> State:
    found = command("queuestatus")
    return State(
        {
            subject(one): Group(
                one["lag"],
                one["oldest_unacked_age"],
                one["in_flight"],
                one["retrying"],
                one["dead_letters"],
                one["paused"],
                len(one["subscribers"]),
            )
            for one in found["groups"]
        },
        frozenset(Problem(one["severity"], one["kind"], subject(one)) for one in found["problems"]),
        sum(topic["waiting"] for topic in found["topics"]),
    )


def queuehealth(*arguments: str) -> tuple[State, set[tuple[str, str]], set[tuple[str, str]]]:
    """The groups, what makes the queue unhealthy, and the notes."""
    found = command("queuehealth", *arguments)
    assert found["healthy"] == (not found["problems"])
    for one in found["groups"]:
        assert all(one[name]["exact"] for name in ("lag", "in_flight", "retrying", "dead_letters"))
    shown = {
        subject(one): Group(
            one["lag"]["value"],
            one["oldest_unacked_age"],
            one["in_flight"]["value"],
            one["retrying"]["value"],
            one["dead_letters"]["value"],
            one["paused"],
            one["subscribers"],
        )
        for one in found["groups"]
    }
    alarms, notes = ({(one["kind"], subject(one)) for one in found[name]} for name in ("problems", "notes"))
    return State(shown, outbox=found["outbox"]["value"]), alarms, notes


def scraped(client: Client) -> State:
    """What Prometheus reads. It knows no problems, and no age without messages."""
    answer = client.get("/metrics/", headers={"accept": "text/plain"})
    assert answer.status_code == 200, answer.content
    values: dict[str, dict[str, float]] = {}
    queue: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.content.decode()):
        for sample in family.samples:
            name = sample.name.removeprefix("mysqlqueue_")
            if name == "count_exact":
                assert sample.value == 1
            elif "group" in sample.labels:
                ref = f"{sample.labels['group']}/{sample.labels['topic']}"
                values.setdefault(ref, {})[name] = sample.value
            else:
                queue[name] = sample.value
    return State(
        {
            ref: Group(
                int(one["lag"]),
                one["oldest_unacked_age_seconds"] or None,
                int(one["in_flight"]),
                int(one["retrying"]),
                int(one["dead_letters"]),
                bool(one["paused"]),
                int(one["subscribers"]),
            )
            for ref, one in values.items()
        },
        outbox=int(queue["outbox_waiting"]),
    )


class Page(HTMLParser):
    """The rows of the tables of a page of the dashboard, its cards and its problems."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.cards: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.facts = ""
        self._section = self._term = ""
        self._into: Callable[[str], object] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "section":
            self._section = given["aria-labelledby"]
        elif tag == "tr":
            self.tables.setdefault(self._section, []).append([])
        elif tag in ("td", "th"):
            self.tables[self._section][-1].append("")
            self._into = self._cell
        elif tag == "dt":
            self._term, self._into = "", self._name
        elif tag == "dd":
            self.cards[self._term], self._into = "", self._value
        elif tag == "p" and given.get("class") == "mq-facts":
            self._into = self._fact
        elif tag == "li" and "data-kind" in given:
            severity = int(given["class"].removeprefix("mq-severity-"))
            self.problems.append(Problem(severity, given["data-kind"], given["data-group"]))
        elif tag == "title":
            self._into = None

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "dt", "dd", "p"):
            self._into = None

    def handle_data(self, data: str) -> None:
        if self._into is not None:
            self._into(data)

    def _cell(self, data: str) -> None:
        self.tables[self._section][-1][-1] += data.strip() and f"{data.strip()} "

    def _name(self, data: str) -> None:
        self._term += data

    def _value(self, data: str) -> None:
        self.cards[self._term] += data

    def _fact(self, data: str) -> None:
        self.facts += data


def opened(client: Client, name: str = "", **query: str) -> Page:
    answer = client.get(DASHBOARD + name, query)
    assert answer.status_code == 200, answer.content.decode()
    return Page(answer.content.decode())


def seconds(text: str) -> float | None:
    """The length of time that a page shows."""
    units = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "d": 86_400}
    found = re.findall(r"([\d.]+) (ms|s|min|h|d)\b", text)
    return sum(float(number) * units[unit] for number, unit in found) if found else None


def number(text: str) -> int:
    return int(text.strip().replace(",", ""))


def overview_page(client: Client) -> State:
    page = opened(client)
    _head, *rows = page.tables["mq-groups"]
    shown = {}
    for cells in rows:
        if len(cells) == 1:
            continue  # "No group is registered yet"
        name, state, lag, oldest, _in, _out, _drain, _failed, dead, _limits, subscribers = cells
        group, topic, _mode = name.replace(",", "").split()
        held = {kind: number(count) for count, kind in re.findall(r"([\d,]+) (in flight|retrying)", lag)}
        shown[f"{group}/{topic}"] = Group(
            number(lag.split()[0]),
            seconds(oldest),
            held.get("in flight", 0),
            held.get("retrying", 0),
            number(dead),
            "paused" in state,
            number(subscribers),
        )
    return State(shown, frozenset(page.problems), number(page.cards["due in the outbox"]))


def group_page(client: Client, ref: str) -> tuple[Group, frozenset[Problem]]:
    group, topic = ref.split("/")
    page = opened(client, "group/", group=group, topic=topic)
    cards = page.cards
    found = Group(
        number(cards["backlog"]),
        seconds(cards["oldest unsettled message"]),
        number(cards["in flight"]),
        number(cards["retrying"]),
        number(cards["dead letters"]),
        "paused" in page.facts,
        number(cards["live subscribers"]),
    )
    return found, frozenset(page.problems)


@pytest.fixture
def client(db: None, settings: Any) -> Iterator[Client]:
    settings.ROOT_URLCONF = __name__
    User.objects.all().delete()
    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    yield client
    User.objects.all().delete()


def ages_apart(shown: Mapping[str, Group], true: Mapping[str, Group]) -> list[str]:
    """Groups whose age is not the true one, for all that a test takes and a page rounds."""
    wrong = []
    for ref, group in true.items():
        age = shown[ref].age
        matches = age is None if group.age is None else age is not None and 0 <= age - group.age + 2 <= SLACK
        if not matches:
            wrong.append(f"{ref}: {age} for {group.age}")
    return wrong


def ageless(found: Mapping[str, Group]) -> dict[str, Group]:
    return {ref: dataclasses.replace(group, age=None) for ref, group in found.items()}


@pytest.mark.parametrize("stage_state", STATES, ids=lambda state: state.__name__)
def test_all_readers_say_what_the_state_is(client, clock, settings, stage_state):
    true = stage_state(Stage(clock, settings))
    health, alarms, notes = queuehealth()
    overview = overview_page(client)
    pages = {ref: group_page(client, ref) for ref in true.groups}
    readers = {
        "queuestatus": queuestatus(),
        "queuehealth": health,
        "metrics": scraped(client),
        "overview": overview,
        "groups": State({ref: found for ref, (found, _) in pages.items()}, outbox=true.outbox),
    }
    for name, shown in readers.items():
        assert ageless(shown.groups) == ageless(true.groups), name
        assert ages_apart(shown.groups, true.groups) == [], name
        assert shown.outbox == true.outbox, name
    assert sorted(readers["queuestatus"].problems) == sorted(overview.problems) == sorted(true.problems)
    of_group = {ref: {one for one in true.problems if one.group == ref} for ref in true.groups}
    assert {ref: set(found) for ref, (_, found) in pages.items()} == of_group
    alarming = {one for one in true.problems if one.severity == 0 or one.kind in ALARMING_NOTES}
    assert alarms == {(one.kind, one.group) for one in alarming}
    assert notes == {(one.kind, one.group) for one in true.problems - alarming}
