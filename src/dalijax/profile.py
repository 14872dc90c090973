"""Reports whether a training loop waits for its input: ``from dalijax.profile import profile``.

    with profile(iterator) as report:
        for batch in itertools.islice(iterator, 100):
            step(batch)
    print(report)

See `profile` for its arguments.
"""

from .core.messages import replacements as _replacements
from .core.tools.profile.profile import Report as Report
from .core.tools.profile.profile import profile as profile

__all__ = ["Report", "profile"]

_replacements.not_callable(__name__)
