"""Tables of the application, for handlers that write."""

from django.db import models


class Account(models.Model):
    balance = models.BigIntegerField(default=0)


class Job(models.Model):
    """A row that bare.py deletes instead of an ack."""
