"""Records: encoded images and their numbers."""

import page_data
from absl import flags

flags.FLAGS.mark_as_parsed()  # Grain's workers ask for it
page_data.draw_folder()
records = page_data.read_records()
