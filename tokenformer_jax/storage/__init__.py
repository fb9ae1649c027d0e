"""Files on disks and in buckets: paths, and which of their errors are tried again."""
