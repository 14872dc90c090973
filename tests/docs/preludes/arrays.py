"""Volumes in class folders, and a table."""

import pathlib

import numpy as np
from arrays import draw_volumes

draw_volumes(pathlib.Path("volumes"), 10)
np.save("all.npy", np.zeros((6, 32, 32, 32), np.float32))
np.save("age.npy", np.arange(20, 80, 10))
