from django.db import models


class Effect(models.Model):
    """The table of ``tests.app``, whose handlers the last release may not know how to declare."""

    name = models.CharField(max_length=200)
    value = models.BigIntegerField(default=0)

    class Meta:
        managed = False
        db_table = "tests_app_effect"
