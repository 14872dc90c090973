"""Readers of file formats, independent of sources and pipelines.

Byte ranges of local and remote files, path patterns, tar and TFRecord headers, protobuf messages,
sizes and EXIF orientations of images, headers of video and sound files, and the indexes of records
in larger files, with their cache on disk.
"""
