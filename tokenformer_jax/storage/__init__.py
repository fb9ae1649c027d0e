"""Files on disks and in buckets: paths, and retries of errors that may pass."""
