"""trace: a model and example inputs become a `Graph`. The only stage before emit that needs torch."""

from autopar.trace.capture import Captured, TraceError, capture, flatten_inputs
from autopar.trace.lower import lower
from autopar.trace.normalise import normalise

__all__ = ["Captured", "TraceError", "capture", "flatten_inputs", "lower", "normalise"]
