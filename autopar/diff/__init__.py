"""What makes two plans of one model different, and what each difference costs."""

from autopar.diff.account import Account, Part, account_of
from autopar.diff.compare import Difference, difference
from autopar.diff.text import in_a_line, report, sentence

__all__ = ["Account", "Difference", "Part", "account_of", "difference", "in_a_line", "report", "sentence"]
