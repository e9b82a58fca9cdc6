"""The backend of the alias ``replica``: whoever reads it by mistake fails."""

from typing import Any, NoReturn

from django.db.backends.sqlite3 import base


class DatabaseWrapper(base.DatabaseWrapper):
    def get_new_connection(self, conn_params: dict[str, Any]) -> NoReturn:
        raise AssertionError("the replica was read")
