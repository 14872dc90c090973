"""Parts of messages that all layers use.

`printable` escapes names of files and records, which may contain control characters. `replacements`
suggests names for unknown arguments, functions and options. `user_warnings` issues warnings at the
user's line of code, and `log_once` logs warnings once for each process.
"""
