"""Robot data: steps of episodes in RLDS's format, and the packer of LeRobot data sets.

`rlds` is the source. `rlds_features` reads the features of a data set, `episode_columns` and
`episode_ranges` find the values of the episodes in their files, and `episode_index` builds the
index from them. `lerobot` writes episodes of LeRobot data sets as RLDS's TFRecords. Only the public
names of `dalijax.sources` and the commands in `core.tools` import this package.
"""
