"""The dashboard as a user's browser reads it."""

from __future__ import annotations

import re
from html import unescape

from django.contrib import admin
from django.urls import path

from django_mysqlqueue.admin.dashboard import DashboardAdmin
from django_mysqlqueue.models import Dashboard, QueueMessage
from django_mysqlqueue.options.backoff import Backoff

other_site = admin.AdminSite(name="ops")
other_site.register(Dashboard, DashboardAdmin)
urlpatterns = [path("admin/", admin.site.urls), path("deep/er/ops/", other_site.urls)]
ROOT = "/admin/django_mysqlqueue/dashboard/"
HOSTILE = "<script>alert(1)</script>\"'&{{ 7|add:1 }}"
WAITS = Backoff(initial=3600, jitter=0)


def page(client, name="", status=200, **query):
    answer = client.get(ROOT + (f"{name}/" if name else ""), query)
    assert answer.status_code == status, answer.content.decode()
    return unescape(answer.content.decode())


def submitted(text):
    """What a browser sends of the filter of a page: it removes the ends of lines from visible inputs."""
    (form,) = re.findall(r'<form class="mq-filter".*?</form>', text, re.DOTALL)
    found = {}
    for tag in re.findall(r"<input[^>]*>", form):
        attributes = dict(re.findall(r'([\w-]+)="([^"]*)"', tag))
        value = attributes.get("value", "")
        if attributes["type"] not in ("checkbox", "hidden"):
            value = re.sub("[\r\n]", "", value)
        if attributes["type"] != "checkbox":
            found[attributes["name"]] = unescape(value)
    for name, options in re.findall(r'<select name="([^"]*)">(.*?)</select>', form, re.DOTALL):
        for value in re.findall(r'value="([^"]*)" selected>', options):
            found[name] = unescape(value)
    return found


def hidden(text):
    """The values of a confirmation page's form, as a browser would send them."""
    found = {}
    for tag in re.findall(r"<(?:input|textarea)[^>]*>", text):
        attributes = dict(re.findall(r'([\w-]+)="([^"]*)"', tag))
        if attributes.get("type") == "hidden":
            found.setdefault(attributes["name"], []).append(unescape(attributes.get("value", "")))
    return found


def confirm(client, name, **values):
    """Asks for an operation, presses its button, and returns what the next page says."""
    asked = client.post(f"{ROOT}do/{name}/", {**values, "asked": "yes"})
    assert asked.status_code == 200
    sent = {**hidden(asked.content.decode()), **values, "confirmed": "yes"}
    done = client.post(f"{ROOT}do/{name}/", sent, follow=True)
    assert done.status_code == 200
    return [str(message) for message in done.context["messages"]]


def query_of(name):
    if name == "deadletter":
        first = QueueMessage.objects.filter(failed_group__gt="").values_list("offset", flat=True).first()
        return {"offset": first or 1}
    return {"group": {"group": "g", "topic": "t"}, "job": {"id": "j"}}.get(name, {})


def life(client, offset, group="g"):
    """What a message's page tells of one group: its tag, what happened, what is not known."""
    answer = client.get(f"{ROOT}message/", {"offset": offset})
    assert answer.status_code == 200, answer.content.decode()
    (one,) = [one for one in answer.context["lives"] if one.ref.group == group]
    return one.tag, [step.text for step in one.steps], one.note
