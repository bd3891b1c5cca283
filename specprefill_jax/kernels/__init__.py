"""The two steps between the models: importance aggregation and chunk top-k, for CPU, GPU and TPU.

One folder a kernel: `reference.py` says in plain JAX what is computed, and ships as the fallback; `triton.py` and
`mosaic_tpu.py` compute the same with Pallas; the folder's `__init__.py` dispatches.
"""
