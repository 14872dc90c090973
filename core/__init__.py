"""The package without any ecosystem: iterators over DALI pipelines, with positions and states.

Layers, from the bottom: `order`, `random` and placement are pure functions; `formats`
reads files; `state` encodes positions; `pipeline` makes and runs DALI pipelines. `iterator`,
`records`, `functions`, `sources` and `augment` are siblings that do not import one another. `tools`
uses iterators as users do. Imports go down only. Nothing in here is public: users import `dalijax`.
"""
