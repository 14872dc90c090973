"""One module or folder for each ecosystem: CLU, Grain, Pax, T5X, tf.data.

Each translates an iterator into its ecosystem's protocol and decides nothing itself. They
import `core` (`t5x` also `clu`), and need the extra of their name, for example
``pip install dalijax[grain]``. The names in a module's or folder's docstring are public.
"""
