"""What the handlers of the benchmarks write."""

from django.db import models


class Effect(models.Model):
    """One row for each message of a handler that inserts."""

    value = models.BigIntegerField(default=0)


class Counter(models.Model):
    """One row for each thread of a handler that updates."""

    value = models.BigIntegerField(default=0)
