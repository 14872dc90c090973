"""A folder of pictures, one folder for each class."""

import pathlib

from pictures import make_pictures

pathlib.Path("imagenet").mkdir()
make_pictures(pathlib.Path("drawn"), count=300).rename("imagenet/train")
paths = sorted(map(str, pathlib.Path("imagenet/train").glob("*/*.jpg")))
labels = list(range(len(paths)))
