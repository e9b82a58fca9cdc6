"""Tables that the handlers of the benchmarks write."""

from django.db import models


class Effect(models.Model):
    """A row that a handler inserts for each message."""

    value = models.BigIntegerField(default=0)


class Counter(models.Model):
    """A row that a handler updates, one per thread."""

    value = models.BigIntegerField(default=0)
