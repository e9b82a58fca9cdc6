"""Functions that analyze the log, recorded deliveries and rollups.

Each function takes DataFrames with the columns of ``log_schema.COLUMNS`` (the log), ``tables.EVENTS_DDL``,
``tables.ROLLUPS_DDL`` or ``tables.GROUPS_DDL``, and returns a DataFrame. No function starts a Spark job. Days and hours
are in the session's time zone, which ``session()`` sets to UTC.
"""
