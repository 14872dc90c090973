"""The package without any ecosystem: DALI's pipelines as iterators with a position.

The modules of this folder are pure: epochs, placement, seeds, configuration. Above them lie
`state`, then `pipeline`, then `iterator`, `records`, `functions` and `sources`, which never import
one another, and `tuning` and `show`. Imports run down only. Nothing here is public: users import
`dalijax`, and `adapters` translate.
"""
