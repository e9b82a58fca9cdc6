"""A table of the application's own, for what handlers write."""

from django.db import models


class Effect(models.Model):
    """One row for each effect of a handler."""

    name = models.CharField(max_length=200)
    value = models.BigIntegerField(default=0)
