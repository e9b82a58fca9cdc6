"""Who may see and do what on the dashboard."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.test import Client

from django_mysqlqueue.admin.operations import OPERATIONS
from django_mysqlqueue.admin.pages import PAGES
from django_mysqlqueue.models import ConsumerGroup
from tests.support.dashboard import ROOT, hidden, page, query_of

PLACES = [one.name for one in PAGES]


@pytest.mark.parametrize("name", PLACES)
def test_who_may_not_view_sees_nothing(make_client, name):
    ConsumerGroup.objects.create(consumer_group="g", topic="t", mode="ordered")
    address = ROOT + ("" if name == "changelist" else f"{name}/")
    assert make_client().get(address, query_of(name)).status_code == 403
    assert make_client("operate_dashboard", "see_payloads").get(address, query_of(name)).status_code == 403
    further = ["view_operation"] if name == "operations" else []
    assert make_client("view_dashboard", *further).get(address, query_of(name)).status_code == 200
    assert make_client("view_dashboard", staff=False).get(address, query_of(name)).status_code == 302
    assert Client().get(address, query_of(name)).status_code == 302


def test_who_may_view_only_changes_nothing(make_client):
    client = make_client("view_dashboard", "see_payloads")
    ConsumerGroup.objects.create(consumer_group="g", topic="t", mode="ordered")
    for name in OPERATIONS:
        for send in (client.get, client.post):
            assert send(f"{ROOT}do/{name}/", {"group": "g", "topic": "t"}).status_code == 403
    assert "do/" not in page(client, "group", group="g", topic="t")
    assert not ConsumerGroup.objects.get().paused


def test_an_operation_needs_a_post_with_the_csrf_token(make_client):
    client = make_client("view_dashboard", "operate_dashboard")
    ConsumerGroup.objects.create(consumer_group="g", topic="t", mode="ordered")
    asked = client.get(f"{ROOT}do/pause/", {"group": "g", "topic": "t", "confirmed": "yes"})
    values = {**hidden(asked.content.decode()), "confirmed": "yes"}
    assert asked.status_code == 200
    assert not ConsumerGroup.objects.get().paused
    client.get(f"{ROOT}do/pause/", values)
    assert not ConsumerGroup.objects.get().paused
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(User.objects.get())
    assert strict.post(f"{ROOT}do/pause/", {**values, "csrfmiddlewaretoken": "x"}).status_code == 403
    assert not ConsumerGroup.objects.get().paused
    client.post(f"{ROOT}do/pause/", values)
    assert ConsumerGroup.objects.get().paused


def test_pages_answer_only_get(client):
    assert client.post(ROOT).status_code == 405
