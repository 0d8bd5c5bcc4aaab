"""Who may import whom, read from the sources.

The rules are those of docs/design.md's layout: imports point down, planning
is pure, one package touches the extension, and only scripts read flags or
the environment. The checker is a function of source text, and each rule is
shown to fail on a source that breaks it.
"""

import ast
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_MAX_LINES = 500

# Top to bottom: a part may import itself and the parts after it.
_LAYERS = (
  "trainer",
  "auto",
  "calibrate",
  "checkpoint",
  "array_store",
  "runtime",
  "programs",
  "host",
  "planner",
  "graph",
  "plan",
  "cluster",
  "models",
  "data",
)
# Parts that may import less than all that is below them.
_NARROWER = {
  "planner": {"graph", "plan"},
  "graph": {"plan"},
  "array_store": set(),
  "plan": set(),
  "models": set(),
  "data": set(),
  "reference": {"plan", "models"},
}
_WITHOUT_JAX = {"planner", "graph", "plan", "data"}
_JAX_NAMES = {"flax", "jax", "jaxlib", "optax", "orbax"}
# What the environment says about the devices decides how they are driven.
_MAY_READ_ENVIRONMENT = {"sojax.cluster.mesh"}
_FLAG_MODULES = {"absl", "argparse", "click", "getopt"}
_SETTINGS = {
  "os.environ",
  "os.environb",
  "os.getenv",
  "os.getenvb",
  "sys.argv",
}


def _part(module: str) -> str | None:
  """The part of sojax that a module's name belongs to, "" for sojax."""
  names = module.split(".")
  if names[0] != "sojax":
    return None
  return "" if names[1:] in ([], ["__init__"]) else names[1]


def _allowed(part: str) -> set[str]:
  """The parts that a part may import besides itself."""
  if part in _NARROWER:
    return _NARROWER[part]
  return set(_LAYERS[_LAYERS.index(part) + 1 :])


def _imports(module: str, tree: ast.AST):
  """Yields the full names of all that is imported, at any depth."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        base = ".".join([*module.split(".")[: -node.level], base]).strip(".")
      # Of `from sojax import plan` and `from os import environ` the last
      # word says what is imported.
      yield from (f"{base}.{alias.name}" for alias in node.names)


def _attributes(tree: ast.AST):
  """Yields what is written as name.attribute."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      yield f"{node.value.id}.{node.attr}"


def _import_fault(module: str, imported: str) -> str | None:
  """Says which rule one import of a module of sojax breaks, if any."""
  part = _part(module)
  top = imported.split(".")[0]
  if top in ("experiments", "tests"):
    return f"imports {top}"
  if top in _FLAG_MODULES or imported in _SETTINGS:
    return f"reads flags or the environment: {imported}"
  if top in _JAX_NAMES and part in _WITHOUT_JAX:
    return f"imports {top}, and {part} is pure"
  if top == "matplotlib":
    return "draws"
  if top == "tokenizers":
    return "imports tokenizers"
  if top != "sojax":
    return None
  if "_cpu_ops" in imported.split("."):
    return None if part == "host" else "imports the extension"
  if part == "":
    return None
  other = _part(imported)
  if other == part or (other and other in _allowed(part)):
    return None
  return f"imports {imported}, and {part} is not above it"


def faults(module: str, source: str) -> list[str]:
  """Lists the rules that a module of sojax breaks.

  Args:
    module: full name, such as "sojax.plan.plan".
    source: its text.
  """
  part = _part(module)
  if part not in ("", *_LAYERS, *_NARROWER):
    return [f"{module} belongs to no layer"]
  tree = ast.parse(source)
  found = [_import_fault(module, name) for name in _imports(module, tree)]
  found += [
    f"reads flags or the environment: {name}"
    for name in _attributes(tree)
    if name in _SETTINGS and module not in _MAY_READ_ENVIRONMENT
  ]
  num_lines = source.count("\n") + 1
  if num_lines > _MAX_LINES:
    found.append(f"has {num_lines} lines, more than {_MAX_LINES}")
  return [f"{module} {fault}" for fault in found if fault]


def _modules(package: str):
  for path in sorted((_ROOT / package).rglob("*.py")):
    parts = path.relative_to(_ROOT).with_suffix("").parts
    # A package's own file keeps its last word, so that the dots of its
    # relative imports count as those of a module in it.
    yield ".".join(parts), path.read_text()


def test_sojax_keeps_its_layers():
  found = [
    fault
    for name, source in _modules("sojax")
    for fault in faults(name, source)
  ]
  assert found == []


def test_experiments_are_short_and_only_plots_draws():
  for name, source in _modules("experiments"):
    assert source.count("\n") < _MAX_LINES, name
    tops = {i.split(".")[0] for i in _imports(name, ast.parse(source))}
    assert name == "experiments.plots" or "matplotlib" not in tops, name


@pytest.mark.parametrize(
  ("module", "source"),
  [
    ("sojax.plan.plan", "from sojax.runtime import executor"),
    ("sojax.plan.plan", "import sojax.runtime.executor"),
    ("sojax.plan.plan", "from sojax import graph"),
    ("sojax.plan.plan", "from sojax import Trainer"),
    ("sojax.plan.plan", "import sojax"),
    ("sojax.plan.plan", "from ..graph import graph"),
    ("sojax.plan.__init__", "from ..graph import graph"),
    ("sojax.plan.plan", "def f():\n  import jax"),
    ("sojax.plan.plan", "from sojax.models import stage"),
    ("sojax.graph.graph", "from jax import numpy"),
    ("sojax.graph.graph", "import sojax.planner.search"),
    ("sojax.planner.search", "from sojax.models import gpt"),
    ("sojax.models.gpt", "from sojax.host import kernels"),
    ("sojax.models.gpt", "from sojax.programs import stages"),
    ("sojax.data.text", "from sojax.models import gpt"),
    ("sojax.data.text", "import jax.numpy as jnp"),
    ("sojax.host.adam", "from sojax.programs import stages"),
    ("sojax.programs.stages", "from sojax.runtime import lanes"),
    ("sojax.checkpoint", "from sojax.trainer import Trainer"),
    ("sojax.trainer", "from sojax.reference import loop"),
    ("sojax.reference.loop", "from sojax.trainer import Trainer"),
    ("sojax.runtime.executor", "from sojax import _cpu_ops"),
    ("sojax.runtime.executor", "from sojax._cpu_ops import adamw_step"),
    ("sojax.__init__", "from sojax import _cpu_ops"),
    ("sojax.__init__", "from . import _cpu_ops"),
    ("sojax.trainer", "import experiments.train"),
    ("sojax.trainer", "from tests import conftest"),
    ("sojax.trainer", "from absl import flags"),
    ("sojax.trainer", "import argparse"),
    ("sojax.trainer", "import os\nx = os.environ['A']"),
    ("sojax.trainer", "import os\nx = os.getenv('A')"),
    ("sojax.trainer", "from os import environ"),
    ("sojax.trainer", "import sys\nx = sys.argv"),
    ("sojax.trainer", "import matplotlib.pyplot"),
    ("sojax.data.tokens", "from tokenizers import Tokenizer"),
    ("sojax.helpers", "x = 1"),
    ("sojax.trainer", "x = 1\n" * _MAX_LINES),
  ],
)
def test_checker_finds_a_fault(module, source):
  assert len(faults(module, source)) == 1


@pytest.mark.parametrize(
  ("module", "source"),
  [
    ("sojax.__init__", "from sojax.trainer import Trainer as Trainer"),
    ("sojax.trainer", "from sojax.runtime import executor\nimport jax"),
    ("sojax.trainer", "import os\nx = os.path.join('a', 'b')"),
    ("sojax.cluster.mesh", "import os\nx = os.environ.get('PJRT_NPROC')"),
    ("sojax.trainer", "x = 1\n" * (_MAX_LINES - 1)),
    ("sojax.runtime.executor", "from . import lanes\nfrom ..plan import plan"),
    ("sojax.host.kernels", "from sojax import _cpu_ops"),
    ("sojax.plan.__init__", "from .plan import Plan"),
    ("sojax.plan.plan", "import numpy as np\nimport ml_dtypes"),
    ("sojax.graph.schedule", "from sojax.plan.plan import Plan"),
    ("sojax.models.gpt", "import jax\nfrom sojax.models import stage"),
    ("sojax.reference.loop", "import optax\nfrom sojax.models import stage"),
  ],
)
def test_checker_accepts(module, source):
  assert faults(module, source) == []
