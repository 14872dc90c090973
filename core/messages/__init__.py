"""Parts of messages that all layers use.

`printable` escapes names of files and records, which may contain control characters. `redaction`
removes secrets from URLs and texts, and `redacted_errors` from errors and their causes.
`replacements` suggests names for unknown arguments, functions and options. `user_warnings` issues
warnings at the user's line of code. `log_once` logs warnings once for each process, and filters all
log records.
"""
