"""Many requests at once: scheduling, paged caches, batched decoding.

`scheduler` and `blocks` decide, in plain Python; `runner` owns everything compiled; `engine` is the loop between them.
"""
