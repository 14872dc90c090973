"""Whether a training loop waits for its input, and for which part of it.

`dalijax.profile` is the public name. `loop` is about the loop's own times, `replay` runs the graph
alone and cut behind its operators, `verdict` puts both into words, and `profile` is the block that
the loop runs in. It uses the iterator as any caller would, and nothing below imports it.
"""
