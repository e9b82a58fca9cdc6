"""Each filter of the dashboard's pages that takes a text says how it compares it, and compares it like that."""

from __future__ import annotations

import re

import pytest

from django_mysqlqueue import operations, publish
from django_mysqlqueue.admin.pages import PAGES
from tests.support import job_worlds
from tests.support.dashboard import ROOT, page, query_of
from tests.support.harness import Sub, handler, sequence
from tests.support.job_pages import job
from tests.support.scenarios import dead_letters

FIELDS = {
    ("operations", "group"): ("group-1", {}),
    ("operations", "by"): ("adam", {}),
    ("messages", "key"): ("key-1", {"topic": "topic-1"}),
    ("messages", "id"): ("id-1", {"topic": "topic-1"}),
    ("messages", "contains"): ("letters", {"topic": "topic-1"}),
    ("offsets", "prefix"): ("key-1", {}),
    ("offsets", "owner"): ("host-7", {}),
    ("jobs", "task"): ("shop.tasks.mail", {}),
    ("jobs", "id"): ("job-1", {}),
    ("scheduled", "id"): ("later-1", {"topic": "topic-1"}),
    ("scheduled", "task"): ("shop.tasks.mail", {}),
    ("inflight", "subscriber"): ("host-7", {}),
    ("deadletters", "error"): ("ValueError", {}),
    ("deadletters", "key"): ("key-1", {}),
}
"""By page and parameter, a text that finds a row, and the other parameters that it needs."""
LABELS = {"exact": r" \(exact\)$", "prefix": r" begins with$", "part": r" contains$"}


@pytest.fixture
def world(client, settings):
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["default"]}}
    dead_letters(1, keys=["key-1"])
    publish("topic-1", "letters", key="key-1", id="id-1")
    publish("topic-1", 2, key="key-1", id="later-1", delay=3600)
    publish("jobs.default", 2, key="shop.tasks.mail", delay=3600)
    job("job-1")
    sequence()
    sub = Sub(handler("topic-1", "group-1"), name="host-7")
    sub.step()
    operations.pause("group-1", "topic-1", actor="adam")
    return sub


def fields(client, name):
    """By parameter, the label of each field of a page's filter that takes a text."""
    text = page(client, "" if name == "changelist" else name, **query_of(name))
    labels = re.findall(r"<label>([^<]*) <input type=\"(?:text|search)\" name=\"(\w+)\"", text)
    return {parameter: label for label, parameter in labels}


def rows(client, name, query):
    return len(client.get(f"{ROOT}{name}/", query).context["rows"])


def test_each_label_says_how_its_text_is_compared(client, world):
    found = {(one.name, parameter): label for one in PAGES for parameter, label in fields(client, one.name).items()}
    assert set(found) == set(FIELDS)
    for (name, parameter), label in found.items():
        assert sum(bool(re.search(pattern, label)) for pattern in LABELS.values()) == 1, (name, parameter, label)


@pytest.mark.parametrize(("name", "parameter"), list(FIELDS))
def test_it_is_compared_like_that(client, world, name, parameter):
    label = fields(client, name)[parameter]
    (how,) = [how for how, pattern in LABELS.items() if re.search(pattern, label)]
    text, others = FIELDS[name, parameter]
    if parameter in ("owner", "subscriber"):
        text = world.name
    assert rows(client, name, {**others, parameter: text}) > 0
    finds = {
        text[:-1]: how in ("prefix", "part"),
        text[1:]: how == "part",
        text[1:-1]: how == "part",
        f"{text}x": False,
    }
    if name != "deadletters":  # texts of errors are compared without regard to case
        finds[text.swapcase()] = False
    assert {one: rows(client, name, {**others, parameter: one}) > 0 for one in finds} == finds
