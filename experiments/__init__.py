"""Scripts that use sojax: training on text, and measurements."""
