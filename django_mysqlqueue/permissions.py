"""Permissions of Django's users on topics.

A user has a permission on a topic with the permission itself, which covers all topics, or with the permission on an
object: a ``Topic``. Django's own backend knows no permissions on objects; django-guardian and others do.
"""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_backends
from django.contrib.auth.backends import ModelBackend

from django_mysqlqueue import naming
from django_mysqlqueue.models import Topic
from django_mysqlqueue.service import log
from django_mysqlqueue.sql.session import Session

VIEW = "django_mysqlqueue.view_dashboard"
"""View the pages of the dashboard, without payloads and metadata."""
SEE_PAYLOADS = "django_mysqlqueue.see_payloads"
"""View payloads and metadata of messages."""
OPERATE = "django_mysqlqueue.operate_dashboard"
"""Run operations."""


def has_permission(user: Any, permission: str, topic: str | None) -> bool:
    """Return whether a user has a permission on a topic. A DLQ topic counts as its topic.

    Args:
        user: the user, who may be anonymous.
        permission: the name, with the app's label.
        topic: the name of the topic; None: whether the user has the permission on all topics.
    """
    if user.has_perm(permission):
        return True
    return topic is not None and bool(user.has_perm(permission, Topic(name=naming.first_topic(topic))))


def visible_topics(user: Any, using: str) -> frozenset[str] | None:
    """Return the topics that a user may view, without DLQ topics, which count as their topics; None: all.

    Args:
        user: the user.
        using: alias of the queue's database.
    """
    if user.has_perm(VIEW):
        return None
    if not user.is_active or not _knows_objects():
        return frozenset()
    topics = {naming.first_topic(topic) for topic in log.known(Session(using))}
    return frozenset(topic for topic in topics if user.has_perm(VIEW, Topic(name=topic)))


def _knows_objects() -> bool:
    """Return whether a backend may grant permissions on objects: Django's own does not, so it need not be asked."""
    return any(type(backend) is not ModelBackend for backend in get_backends())
