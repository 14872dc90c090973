"""Records: encoded pictures and their numbers."""

import pathlib

import numpy as np
from absl import flags
from pictures import make_pictures

flags.FLAGS.mark_as_parsed()  # Grain's workers ask for it

pathlib.Path("imagenet").mkdir()
make_pictures(pathlib.Path("drawn"), count=300).rename("imagenet/train")


records = [
    {"image": np.fromfile(path, np.uint8), "label": np.int32(number)}
    for number, path in enumerate(sorted(pathlib.Path("imagenet/train").glob("*/*.jpg")))
]
