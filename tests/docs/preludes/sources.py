"""A folder of images, one folder for each class, and a folder of tars."""

import pathlib

from page_data import draw_folder

from tars import samples, write_tar

draw_folder()
pathlib.Path("shards").mkdir()
for k in range(4):
    write_tar(f"shards/{k:03d}.tar", samples(k * 10, k * 10 + 10))
