"""Readers of file formats, independent of sources and pipelines.

Byte ranges of local and remote files, path patterns, tar and TFRecord headers, protobuf messages,
and the headers of image, video and sound files.
"""
