"""`autopar.einsum`: a product of two tensors by named dims (`b s k, n k -> b s n`), done as one product of matrices.

A dim of size one may be written `1`. Letters of both operands that the result lacks are summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

EINSUM = "autopar.einsum"

Letters = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Equation:
    """`left`, `right`, `result`: the letters of their dims. `shared`: those of all three, a batch of matrices; `rows`,
    `columns`: those of one operand, left or right; `summed`: those of both that the result lacks.
    """

    left: Letters
    right: Letters
    result: Letters
    shared: Letters
    rows: Letters
    summed: Letters
    columns: Letters

    @property
    def parts(self) -> tuple[tuple[Letters, Letters, Letters], tuple[Letters, Letters, Letters]]:
        """Of either operand the letters of each dim of the batch of matrices that it becomes."""
        return (self.shared, self.rows, self.summed), (self.shared, self.summed, self.columns)

    @property
    def made(self) -> Letters:
        """The letters of the product, in the order in which the matrices have them."""
        return (*self.shared, *self.rows, *self.columns)


def read(text: str) -> Equation:
    """The equation in this text; `equation_of` knows it the next time."""
    operands, result = (side.split(",") for side in text.split("->"))
    (left, right), (out,) = (tuple(tuple(term.split()) for term in terms) for terms in (operands, result))
    ours, theirs, made = set(left) - {"1"}, set(right) - {"1"}, set(out)
    return Equation(
        left,
        right,
        out,
        shared=tuple(n for n in left if n in ours & theirs & made),
        rows=tuple(n for n in left if n in ours - theirs),
        summed=tuple(n for n in left if n in (ours & theirs) - made),
        columns=tuple(n for n in right if n in theirs - ours),
    )


equation_of = lru_cache(maxsize=4096)(read)  # rules and prices ask it of every node
