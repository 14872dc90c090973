"""A folder of images, one folder for each class."""

from page_data import draw_folder

draw_folder()
