"""Byte ranges of remote files.

Pure modules plan the requests (`ranges`), repeat them (`retries`) and translate URLs and
credentials (`locations`). `object_client` reads through obstore, `fsspec_client` other protocols,
both in the threads of `request_threads`. `range_cache` shares ranges between reads and
announcements.
"""
