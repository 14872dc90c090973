"""Byte ranges of remote files.

Pure modules plan the requests (`ranges`), repeat them (`retries`) and translate URLs and
credentials (`locations`), which selects the client: `object_client` reads http, s3, gs and az
through obstore, `fsspec_client` other protocols, both in the threads of `request_threads`.
`redirects` protects the user's headers. `range_cache` shares ranges between reads and
announcements.
"""
