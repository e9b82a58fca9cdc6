"""The archive: the log as Parquet files. Each range of offsets is archived exactly once.

The files of a range are written under a unique path, read back and compared with the log by a checksum over all
columns. Then a row in the manifest (``queue_archive_segments``) commits the range. Files that no row names are garbage,
wherever their writer died.
"""
