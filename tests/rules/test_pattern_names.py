"""What plans call patterns, beside the patterns that there are."""

from autopar.plan.reading import LOOPED_PRODUCTS, PATTERNED
from autopar.rules import ring
from autopar.rules.patterns import PATTERNS


def test_text_has_a_word_for_every_pattern() -> None:
    attending = {pattern for pattern in PATTERNS if any(f"({pattern})" in told for told in PATTERNED.values())}
    assert len(attending) == len(PATTERNED)
    assert attending | {*LOOPED_PRODUCTS} | {ring.NAME} == {*PATTERNS}  # a ring is told by what each rank keeps
