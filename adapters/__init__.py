"""One module or folder for each ecosystem: CLU, Grain, Pax, T5X, tf.data.

Each translates an iterator into its ecosystem's protocol and decides nothing itself. They
import `core` (`t5x` also `clu`), and need the extra of their name, ``pip install dalijax[grain]``
say. What the docstring of a module or folder names is public.
"""
