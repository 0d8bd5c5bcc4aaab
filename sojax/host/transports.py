"""The sinks that gradients leave through, by the plan's name for the way."""

from sojax.host.python_sink import PythonSink
from sojax.host.sink import GradientSink

SINKS = {"callback": GradientSink, "io_callback": PythonSink}
"""By `StageSpec.transport` and `Plan.gradients_out`; "dma" needs none."""
