"""A folder of images, a graph over them, and a writer."""

from clu import metric_writers
from page_data import draw_folder
from page_data import train as train

draw_folder()
writer = metric_writers.LoggingWriter()
