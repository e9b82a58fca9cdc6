"""A table of the application's own, for handlers that write."""

from django.db import models


class Account(models.Model):
    balance = models.BigIntegerField(default=0)


class Job(models.Model):
    """What the bare loop deletes as its ack."""
