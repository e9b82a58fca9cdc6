"""An app with the command ``db_worker`` and the table of results under the names that those tests use."""
