"""What the models of the queue have in common."""

from __future__ import annotations

from typing import ClassVar, Self, TypeVar

from django.db import models

from django_mysqlqueue.options.conf import get_settings

_M = TypeVar("_M", bound=models.Model)


class QueueManager(models.Manager[_M]):
    """A manager that reads the database that the setting ``DATABASE`` names, unless ``using`` names another one.

    Routers do not know the setting, and a router for reads may name a replica.
    """

    def get_queryset(self) -> models.QuerySet[_M]:
        """Return a queryset on the queue's database."""
        rows = super().get_queryset()
        return rows if self._db is not None else rows.using(get_settings().database)


class QueueModel(models.Model):
    """A model of the queue."""

    objects: ClassVar[QueueManager[Self]] = QueueManager()

    class Meta:
        abstract = True
