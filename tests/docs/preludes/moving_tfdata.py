"""The paths of images, and a label for each."""

import page_data

page_data.draw_folder()
paths = list(map(str, page_data.paths()))
labels = list(range(len(paths)))
