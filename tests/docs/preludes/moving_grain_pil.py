"""Records: encoded images and their numbers."""

import page_data

page_data.draw_folder()
records = [{**record, "image": record["image"].tobytes()} for record in page_data.read_records()]
