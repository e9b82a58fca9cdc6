"""The archive: the log as Parquet files, range by range, each exactly once.

A range's files are written under a path that nobody else uses, read back and
compared with the log by a checksum over every column. Then one row goes into
the manifest (``queue_archive_segments``): that row commits the range. Whatever
no row names is rubbish, at whichever instruction its writer died.
"""
