"""Iterators over DALI pipelines, with positions and states, independent of other libraries.

Layers, from the bottom: `order`, `random` and `placement` compute orders, random numbers and
devices; `formats` reads files; `state` encodes positions; `pipeline` builds and runs DALI
pipelines, and `sources` read records; `functions` and `augment` extend graphs; `feeding` and
`iterator` are the engines and iterators; `api` composes them; `tools` use iterators as users do.
`remote` reads URLs, `environment` finds libraries and devices, and `messages` formats errors. The
modules next to these packages, such as `config` (the iterators' arguments) and `workers` (threads),
serve several of them. Modules import only lower layers. Nothing here is public: users import
`dalijax`.
"""
