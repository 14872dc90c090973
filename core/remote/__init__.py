"""Byte ranges of remote files.

Pure modules plan the requests (`ranges`), interpret errors (`retries`) and translate URLs and
credentials (`locations`). `object_client` reads through obstore, in the thread of `event_loop`;
`fsspec_client` reads other protocols. `range_cache` shares ranges between reads and announcements.
"""
