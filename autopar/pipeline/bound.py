"""What no order of a step can beat."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.pipeline.play import Durations


def least_seconds(rank_of: Sequence[int], micro_batches: int, durations: Durations) -> float:
    """Seconds below which no schedule of these stages on these ranks ends a step:

        max over ranks of  (sum of F_j and sends for all stages j before the rank's first)  +  its work

    as a rank starts only once a micro-batch has come to its first stage, and then has all of them to do. Stages and
    links may be unequal. With one stage per rank and I = W, without sends, zb-h1 reaches it.
    """
    heads = [0.0]
    for stage in range(len(rank_of) - 1):
        crosses = rank_of[stage] != rank_of[stage + 1]
        heads.append(heads[-1] + durations.forward[stage] + (durations.send[stage] if crosses else 0.0))
    work = [0.0] * (max(rank_of) + 1)
    for stage, rank in enumerate(rank_of):
        backward = min(durations.whole[stage], durations.backward_input[stage] + durations.backward_weight[stage])
        work[rank] += micro_batches * (durations.forward[stage] + backward)
    return max(heads[rank_of.index(rank)] + seconds for rank, seconds in enumerate(work))
