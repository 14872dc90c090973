"""Records: encoded pictures and their numbers."""

import pathlib

import numpy as np
from pictures import make_pictures

pathlib.Path("imagenet").mkdir()
make_pictures(pathlib.Path("drawn"), count=300).rename("imagenet/train")


records = [
    {"image": path.read_bytes(), "label": np.int32(number)}
    for number, path in enumerate(sorted(pathlib.Path("imagenet/train").glob("*/*.jpg")))
]
