"""HiGHS that writes nothing: standard output belongs to the caller's answer."""

import highspy


class QuietHighs(highspy.Highs):
    """`highspy.Highs` with its output off from the start.

    HiGHS 1.16 prints its banner while it is being made (in `enableCallbacks`, which its `__init__` calls), before
    anyone could set `output_flag`; so the option is set there. Earlier versions are quiet either way.
    """

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()
