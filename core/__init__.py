"""Iterators over DALI pipelines, with positions and states, independent of other libraries.

Layers, from the bottom: `order`, `random` and `arrays` compute orders, random numbers and devices;
`remote` reads URLs, and `formats` reads files; `state` encodes positions; `pipeline` builds and
runs DALI pipelines, and `sources` read records; `functions` and `augment` extend graphs, and
`robots` reads robot data; `feeding` and `iterator` are the engines and iterators; `api` composes
them; `tools` use iterators as users do. Parts of the lowest layer serve all others: `arguments`
(checks of calls), `config` (the iterators' arguments), `environment` (libraries and devices),
`messages` and `errors`, `threads`, and `stats` (counters of batches). Modules import only lower
layers. Nothing here is public: users import `dalijax`.
"""
