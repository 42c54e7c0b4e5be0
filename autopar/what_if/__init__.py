"""What if: a question of a search asked anew, of a plan's file alone, on hardware that somebody imagines.

changes    what is changed, in words and figures; the hardware that this makes of another
question   the same plan and the best plan then
report     both beside each other, as text and as JSON
"""

from autopar.what_if.changes import Changes, changes_of, imagined
from autopar.what_if.question import Answers, Asked, what_if

__all__ = ["Answers", "Asked", "Changes", "changes_of", "imagined", "what_if"]
