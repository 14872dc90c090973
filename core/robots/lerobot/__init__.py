"""Packing of LeRobot data sets (parquet files and videos) as RLDS TFRecords.

`dataset` reads the metadata, `episode_rows` and `video_frames` the values of an episode, and
`image_encoding` and `rlds_layout` define what is written. `pack` divides the episodes into shards,
which `shard` writes in several processes, and resumes after an interruption by the `manifest`.
"""
