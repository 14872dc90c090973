"""Tars of images and their classes, with DALI's index files."""

import subprocess
import sys
import sysconfig

import page_data
from labelled import write_labelled_tar

page_data.draw_folder()
tars, indices = [], []
for number in range(2):
    tars.append(f"{number}.tar")
    indices.append(f"{number}.idx")
    write_labelled_tar(tars[-1], page_data.paths()[number::2], "jpg")
    tool = f"{sysconfig.get_path('scripts')}/wds2idx"
    subprocess.run([sys.executable, tool, tars[-1], indices[-1]], check=True, capture_output=True)
