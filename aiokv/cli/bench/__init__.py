"""`aiokv bench NAME`: one module or package per benchmark, each with a `register` that takes the app of them all.

A benchmark is imported when it runs. `cases.py` says what those of single operations vary, `operation_commands.py` are
their commands, `operations/` times them.
What they share: `report.py` prints and judges, `summary.py` is for repeated measurements, `kv_bytes.py` is the memory
of a model whose every byte is known beforehand, `backends.py` looks at what is copied, `hold.py`, `memory.py` and
`garbage.py` measure, `waiting.py` waits for copies. `movers.py` is who copies, `device.py` a CUDA device or the fake
driver, `device_memory.py` the model's memory there.
"""
