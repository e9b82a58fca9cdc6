"""The backend of the alias ``replica``: whoever reads it by mistake fails."""

from typing import Any, NoReturn

from django.db.backends.sqlite3 import base, features


class DatabaseFeatures(features.DatabaseFeatures):
    # Known without asking: Django's own checks of fields want to know it of every alias (from 6.1 on).
    supports_json_field = True


class DatabaseWrapper(base.DatabaseWrapper):
    features_class = DatabaseFeatures

    def get_new_connection(self, conn_params: dict[str, Any]) -> NoReturn:
        raise AssertionError("the replica was read")
