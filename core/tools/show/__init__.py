"""Draws batches as an HTML page, or as a contact sheet.

`dalijax.show` has the public names, and `command` is ``python -m dalijax.show``. `batches` takes
batches of the user's data and restores its position; `contents` describes a batch; `layouts`
guesses the kind of samples from their shapes; `annotations` recognizes boxes, masks and points,
`placing` converts them to pixels of their images, and `overlay` draws them; `pixels`, `audio` and
`step_plots` convert arrays to images; `page`, with the template page.html, and `sheet` draw. No
other package imports this package.
"""
