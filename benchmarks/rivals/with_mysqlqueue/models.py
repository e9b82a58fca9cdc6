"""Tables of bare.py."""

from django.db import models


class Account(models.Model):
    """A row that is updated, as by a job that writes."""

    balance = models.BigIntegerField(default=0)


class Job(models.Model):
    """A row that is deleted instead of an ack."""
