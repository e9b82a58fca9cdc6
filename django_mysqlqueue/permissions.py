"""Permissions of Django's users on topics.

A user has a permission on a topic with the permission itself, which covers all topics, or with the permission on an
object: a ``Topic``. Django's own backend knows no permissions on objects; django-guardian and others do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib.auth import get_backends
from django.contrib.auth.backends import ModelBackend

from django_mysqlqueue.models import Topic
from django_mysqlqueue.options.topics import first_topic

VIEW = "django_mysqlqueue.view_dashboard"
"""View the pages of the dashboard, without payloads and metadata."""
SEE_PAYLOADS = "django_mysqlqueue.see_payloads"
"""View payloads and metadata of messages."""
OPERATE = "django_mysqlqueue.operate_dashboard"
"""Run operations."""
PUBLISH = "django_mysqlqueue.publish_messages"
"""Publish test messages."""
EDIT_SCHEDULES = "django_mysqlqueue.edit_schedules"
"""Create, edit and delete recurring schedules: run any task with any arguments."""
VIEW_OPERATIONS = "django_mysqlqueue.view_operation"
"""View the audit log of all topics."""


def has_permission(user: Any, permission: str, topic: str | None) -> bool:
    """Return whether a user has a permission on a topic. A DLQ topic counts as its topic.

    ``topic``: the name of the topic; None: whether the user has the permission on all topics.
    """
    if user.has_perm(permission):
        return True
    return topic is not None and bool(user.has_perm(permission, Topic(name=first_topic(topic))))


def may_have_topics(user: Any) -> bool:
    """Return whether a user may have permissions on single topics.

    If not, the topics need not be read: Django's own backend grants no permissions on objects.
    """
    return user.is_active and any(type(backend) is not ModelBackend for backend in get_backends())


def visible_topics(user: Any, topics: Iterable[str]) -> frozenset[str]:
    """Return those of some topics that a user may view, without DLQ topics, which count as their topics.

    ``user``: the user, who may not view all topics.
    """
    found = {first_topic(topic) for topic in topics}
    return frozenset(topic for topic in found if user.has_perm(VIEW, Topic(name=topic)))
