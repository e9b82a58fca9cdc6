"""The protocol: publishing, sequencing, claiming, settling, leasing, GC, and the record of operations."""
