"""A folder of images, and a graph over them."""

from page_data import draw_folder
from page_data import train as train

draw_folder()
