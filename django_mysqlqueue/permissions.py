"""Permissions of Django's users on topics.

A user has a permission on a topic with the permission itself, which covers all topics, or with the permission on an
object: a ``Topic``. Django's own backend knows no permissions on objects; django-guardian and others do.
"""

from __future__ import annotations

from typing import Any

from django_mysqlqueue import naming
from django_mysqlqueue.models import Topic

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
