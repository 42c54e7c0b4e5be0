"""A plan as one HTML page, to be opened from disk: what it is, why, what each module does, and the step over time."""

from autopar.page.page import Beside, to_html, write_html

__all__ = ["Beside", "to_html", "write_html"]
