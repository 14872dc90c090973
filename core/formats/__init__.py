"""Readers of file formats, which know neither sources nor pipelines.

Bytes of local and remote files, path patterns, tar and TFRecord headers, protobuf messages, and the
headers of images, videos and sound files.
"""
