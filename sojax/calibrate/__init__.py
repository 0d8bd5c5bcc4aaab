"""Measures this machine, and a model's stages on it."""

from sojax.calibrate.machine import cpu_name, this_machine
from sojax.calibrate.profile import measure_profile
from sojax.calibrate.stages import measure_stages
from sojax.calibrate.timing import Effort

__all__ = [
  "Effort",
  "cpu_name",
  "measure_profile",
  "measure_stages",
  "this_machine",
]
