"""Sequence parallelism for video diffusion transformers: meshes, token shards, the Ulysses exchange.

Knows no model. Importing this package imports neither torch nor any other heavy library.
"""

__version__ = "0.1.0"
