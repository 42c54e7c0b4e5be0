"""Measure this machine, and keep what was measured as a hardware profile: `python -m autopar.calibrate`.

What is timed is what emitted programs run: products through `autopar.emit.ops.einsum`, operators with a fresh result
each time, functional collectives with their wait, all ranks busy at once. CUDA and NCCL go the same way as CPU and
gloo; that part has not been run yet.

    measure   one call -> seconds          compute, collectives   what is called
    ranks     starts the processes         fit, profile           samples -> curves -> `Hardware`, and what drifted
"""
