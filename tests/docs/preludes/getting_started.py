"""The folder of images, and the module that the command measures."""

import pathlib

from images import make_images

make_images(pathlib.Path("drawn"), count=36, sides=(160, 400)).rename("images")
pathlib.Path("my_data.py").write_text("""
from nvidia.dali import fn
from dalijax import data_iterator

@data_iterator(output_map=["images"], reader_name="reader")
def train(data_dir):
    jpegs, _ = fn.readers.file(file_root=data_dir, name="reader")
    return fn.resize(fn.decoders.image(jpegs), size=(32, 32))
""")
