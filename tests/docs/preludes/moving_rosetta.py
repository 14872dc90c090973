"""A folder of pictures as a source."""

from page_data import TRAIN, draw_folder

from dalijax import sources

draw_folder()
source = sources.Files(TRAIN)
