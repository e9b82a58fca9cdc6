"""publish() in requests, with ATOMIC_REQUESTS."""

from __future__ import annotations

import pytest
from django.db import connections, transaction
from django.http import HttpResponse
from django.test import Client
from django.urls import path

from django_mysqlqueue import TransactionMismatch, publish, publish_many
from tests.app.models import Effect
from tests.support.publishing import Undo, committed


def view(request, outcome):
    Effect.objects.create(name="view")
    publish("t", outcome)
    publish_many("t", ["many"])
    if outcome == "raise":
        raise Undo
    return HttpResponse(status=204 if outcome == "succeed" else 404)


@transaction.non_atomic_requests
def view_outside(request):
    publish("t", "kept")
    raise Undo


@transaction.non_atomic_requests(using="default")
def view_on_the_other(request):
    publish("t", "x", on_mismatch=request.GET.get("on_mismatch", "error"))
    if "raise" in request.GET:
        raise Undo
    return HttpResponse()


urlpatterns = [
    path("atomic/<outcome>", view),
    path("outside", view_outside),
    path("other", view_on_the_other),
]


@pytest.fixture
def client(db, settings, monkeypatch):
    settings.ROOT_URLCONF = __name__
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    return Client(raise_request_exception=False)


@pytest.mark.parametrize(
    ("outcome", "status", "kept"), [("succeed", 204, True), ("missing", 404, True), ("raise", 500, False)]
)
def test_atomic_requests(client, outcome, status, kept):
    assert client.get(f"/atomic/{outcome}").status_code == status
    assert committed() == ([f'"{outcome}"', '"many"'] if kept else [])
    assert Effect.objects.count() == kept


def test_a_view_outside_atomic_requests_commits_at_once(client):
    assert client.get("/outside").status_code == 500
    assert committed() == ['"kept"']


def test_atomic_requests_of_another_database(client, other, monkeypatch):
    monkeypatch.setitem(connections.settings["other"], "ATOMIC_REQUESTS", True)
    failing = Client()
    with pytest.raises(TransactionMismatch, match="'default', which has no open transaction, but 'other' has one"):
        failing.get("/other")
    assert client.get("/other?on_mismatch=on_commit&raise").status_code == 500
    assert committed() == []
    assert client.get("/other?on_mismatch=on_commit").status_code == 200
    assert committed() == ['"x"']
    assert client.get("/other?on_mismatch=commit_now&raise").status_code == 500
    assert committed() == ['"x"', '"x"']
