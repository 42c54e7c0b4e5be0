"""What really happens, beside what was predicted.

    operators   single operators, timed on this machine's device before a search: `python -m autopar.search --profile`
    twin        a whole training step of a plan, executed: `python -m autopar.measure plan.json FACTORY`
    pipeline    the same of a step in stages
    memory      the bytes of live tensors, followed operator by operator

`calls` says, without torch, which local call each strategy makes: what is timed, and under which key it is kept
(`cost_models.measured`).
"""
