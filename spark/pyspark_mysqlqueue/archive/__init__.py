"""The archive: the log as a Delta table, which Spark, DuckDB, Polars and others read.

Tasks write Parquet files, read them back and compare each row with the checksum that the server has computed of it.
One commit to the table adds the files of a range and notes its end: either both are in the table or neither is. A run
starts from the end that the table has. Files that no version of the table names are garbage, wherever their writer
died.
"""
