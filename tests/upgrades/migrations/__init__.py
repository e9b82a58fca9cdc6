"""The queue's own migrations and one that only a later version has, for ``MIGRATION_MODULES``."""

from django_mysqlqueue import migrations

__path__ = [*__path__, *migrations.__path__]
