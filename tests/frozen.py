"""Imported last by the forkserver: what it has loaded is garbage to no one, so no rank looks through it.

DeepSpeed collects garbage several times while an engine opens, and the heap of its libraries is large.
"""

import gc

gc.collect()
gc.freeze()
