"""Draws batches: ``python -m dalijax.show module:iterator_fn``.

    python -m dalijax.show my_data:train --batch-size 16 --arg data_dir=imagenet/train

The command writes a page, batch.html, or a picture with ``--out batch.png``. Call `show` to draw
batches in Python. Both need Pillow and Jinja: ``pip install "dalijax[show]"``.
"""

from .core.messages import replacements as _replacements
from .core.tools.show.show import Page as Page
from .core.tools.show.show import show as show

__all__ = ["Page", "show"]

_replacements.not_callable(__name__)

if __name__ == "__main__":
    from .core.tools.show.command import main

    main()
