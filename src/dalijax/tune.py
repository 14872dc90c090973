"""Finds the fastest settings for a pipeline: ``python -m dalijax.tune module:iterator_fn``.

    python -m dalijax.tune my_data:train --batch-size 256 --arg data_dir=imagenet/train

The command prints a table and the line of code to paste. Call `tune` to measure in Python.
"""

from .core.messages import replacements as _replacements
from .core.tools.tune.tune import Tuned as Tuned
from .core.tools.tune.tune import tune as tune

__all__ = ["Tuned", "tune"]

_replacements.not_callable(__name__)

if __name__ == "__main__":
    from .core.tools.tune.command import main

    main()
