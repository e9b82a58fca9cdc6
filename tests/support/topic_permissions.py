"""An authentication backend that grants permissions on topics, as django-guardian does."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.auth.backends import ModelBackend

from django_mysqlqueue.models import Topic


class OnTopics(ModelBackend):
    granted: ClassVar[set[tuple[str, str, str]]] = set()
    """(name of the user, permission, topic)."""

    def has_perm(self, user_obj, perm, obj=None):
        if isinstance(obj, Topic):
            return (user_obj.username, perm, obj.pk) in self.granted
        return super().has_perm(user_obj, perm, obj)
