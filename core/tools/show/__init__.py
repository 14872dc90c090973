"""What is in a batch, as a page or a contact sheet.

`dalijax.show` has the public names, `command` is ``python -m dalijax.show``. `batches` and `draws`
take batches of what the user has, and put it back; `contents` says what a batch has; `layouts`,
`pixels` and `audio` are functions of arrays alone; `page` and `sheet` draw it all as HTML and as
PNG. It uses the iterator as any caller would, and nothing below imports it.
"""
