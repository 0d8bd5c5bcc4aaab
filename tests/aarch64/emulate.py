"""Builds a wheel for aarch64 and tests its kernels on an x86-64 machine.

    python tests/aarch64/emulate.py wheel --dir=build/aarch64 --dist=dist
    python tests/aarch64/emulate.py test --dir=build/aarch64 --dist=dist

A whole aarch64 Python runs under qemu's user emulation. Its packages come from
Debian and PyPI into DIR (800 MB), once; nothing is installed and no privilege
is needed. It calls the cross compiler as a native program, so that setup.py
sees an aarch64 machine and knows nothing of this. Tests run with the wheel, not
with the sources. Needs Debian 12 (or another with Python 3.11),
g++-aarch64-linux-gnu, qemu-user and a Python of at least 3.11 with pip.
"""

import argparse
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile

_REPO = pathlib.Path(__file__).resolve().parents[2]
_PYTHON = "python3.11"
# apt adds what these need.
_DEBIAN_PACKAGES = [_PYTHON, f"lib{_PYTHON}-dev", "libstdc++6", "libgomp1"]
_PYPI_PACKAGES = ["hypothesis", "pybind11", "pytest", "setuptools", "wheel"]
_PLATFORMS = ["manylinux_2_28_aarch64", "manylinux_2_27_aarch64"]
_PLATFORMS += ["manylinux_2_17_aarch64", "manylinux2014_aarch64"]

_TESTS = [
  "tests/test_kernel*",
  "tests/test_record.py",
  "tests/test_rollback.py",
]

# Without SVE, then with each length that has an instance of the kernels. What
# a CPU shares with the first is tested there.
_CPUS = ["neoverse-n1", *(f"max,sve-max-vq={vq}" for vq in (1, 2, 4))]
_ONLY_SVE = ["-k", "not neon and not scalar"]


def _run(*command, **kwargs) -> None:
  subprocess.run(list(map(str, command)), check=True, **kwargs)


def _require(*commands: str) -> None:
  missing = [command for command in commands if shutil.which(command) is None]
  if missing:
    sys.exit(
      f"not found: {', '.join(missing)}; on Debian: apt install"
      " g++-aarch64-linux-gnu qemu-user"
    )


def _fetch_debian_packages(directory: pathlib.Path) -> None:
  """Unpacks an aarch64 Python and what it needs into directory/root.

  apt works with lists and a status of its own, so that to this machine no
  architecture is added.
  """
  apt = directory / "apt"
  for folder in ("lists/partial", "cache/archives/partial"):
    (apt / folder).mkdir(parents=True, exist_ok=True)
  (apt / "status").touch()
  config = apt / "apt.conf"
  config.write_text(f"""
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Debug::NoLocking "true";
Dir::State::Lists "{apt}/lists";
Dir::State::status "{apt}/status";
Dir::Cache "{apt}/cache";
""")
  env = dict(os.environ, APT_CONFIG=str(config))
  _run("apt-get", "-qq", "update", env=env)
  _run(
    *("apt-get", "-qq", "install", "--yes", "--download-only"),
    *_DEBIAN_PACKAGES,
    env=env,
  )
  for package in sorted((apt / "cache/archives").glob("*.deb")):
    _run("dpkg-deb", "--extract", package, directory / "root")
  shutil.rmtree(apt)


def _fetch_wheels(directory: pathlib.Path) -> None:
  """Unpacks what sojax needs to run and be built into directory/site."""
  project = tomllib.loads((_REPO / "pyproject.toml").read_text())["project"]
  wheels = directory / "wheels"
  _run(
    *(sys.executable, "-m", "pip", "download", "--quiet"),
    *("--only-binary=:all:", "--implementation=cp", "--python-version=3.11"),
    *(f"--platform={platform}" for platform in _PLATFORMS),
    *("-c", _REPO / "constraints.txt", "-d", wheels),
    *project["dependencies"],
    *_PYPI_PACKAGES,
  )
  for wheel in sorted(wheels.glob("*.whl")):
    _unpack(wheel, directory / "site")
  shutil.rmtree(wheels)


def _unpack(wheel: pathlib.Path, site: pathlib.Path) -> None:
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(site)


def _digest() -> str:
  """Changes with whatever decides what is fetched."""
  packages = (_DEBIAN_PACKAGES, _PYPI_PACKAGES, _PLATFORMS)
  digest = hashlib.sha256(repr(packages).encode())
  for name in ("constraints.txt", "pyproject.toml"):
    digest.update((_REPO / name).read_bytes())
  return digest.hexdigest()


def prepare(directory: pathlib.Path) -> pathlib.Path:
  """Fetches the Python, unless it is there; returns the command that runs it.

  The command takes Python's arguments. The environment variable QEMU_CPU
  chooses the CPU, SITE a folder of further packages. The command is
  `sys.executable` to the Python, which can so start others.
  """
  _require("qemu-aarch64", "aarch64-linux-gnu-g++", "apt-get", "dpkg-deb")
  stamp = directory / "stamp"
  digest = _digest()
  if not stamp.is_file() or stamp.read_text() != digest:
    print(f"fetching an aarch64 Python into {directory}", flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    _fetch_debian_packages(directory)
    _fetch_wheels(directory)
    stamp.write_text(digest)
  command = directory / "python"
  root = directory / "root"
  command.write_text(f"""#!/bin/sh
exec qemu-aarch64 -L '{root}' -0 '{command}' -U PYTHONDONTWRITEBYTECODE \\
  -E PYTHONHOME='{root}/usr' \\
  -E PYTHONPATH="${{SITE:+$SITE:}}{directory}/site" \\
  '{root}/usr/bin/{_PYTHON}' "$@"
""")
  command.chmod(0o755)
  return command


def build_wheel(directory: pathlib.Path, dist: pathlib.Path) -> pathlib.Path:
  """Builds the wheel from a copy of the sources; returns its path in dist."""
  python = prepare(directory)
  source = directory / "source"
  shutil.rmtree(source, ignore_errors=True)
  source.mkdir()
  for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
    shutil.copy2(_REPO / name, source)
  for name in ("cpu_ops", "sojax"):
    shutil.copytree(
      _REPO / name,
      source / name,
      ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
  # Debian's Python.h includes <aarch64-linux-gnu/python3.11/pyconfig.h>. After
  # all others, since the cross compiler has headers of its own libraries.
  headers = directory / "root/usr/include"
  env = dict(os.environ, CPPFLAGS=f"-idirafter {headers}")
  built = directory / "built"
  shutil.rmtree(built, ignore_errors=True)
  program = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
  log = directory / "build.log"
  with log.open("w") as output:
    try:
      _run(
        *(python, "-c", program, built),
        cwd=source,
        env=env,
        stdout=output,
        stderr=subprocess.STDOUT,
      )
    except subprocess.CalledProcessError:
      sys.exit(f"{log.read_text()}building the wheel failed")
  (wheel,) = built.glob("*aarch64.whl")
  dist.mkdir(parents=True, exist_ok=True)
  return pathlib.Path(shutil.copy2(wheel, dist))


def run_tests(
  directory: pathlib.Path, dist: pathlib.Path, pytest_args: list[str]
) -> None:
  """Runs the tests of the kernels with the wheel, on every emulated CPU."""
  wheel = build_wheel(directory, dist)
  python = prepare(directory)
  installed = directory / "installed"
  # Without the package beside them, so that they import the wheel's.
  tests = directory / "tests"
  for folder in (installed, tests):
    shutil.rmtree(folder, ignore_errors=True)
  _unpack(wheel, installed)
  shutil.copytree(
    _REPO / "tests",
    tests / "tests",
    ignore=shutil.ignore_patterns("__pycache__"),
  )
  shutil.copy2(_REPO / "pyproject.toml", tests)
  files = [
    path.relative_to(tests)
    for pattern in _TESTS
    for path in sorted(tests.glob(pattern))
  ]
  env = dict(os.environ, SITE=str(installed))
  for cpu in _CPUS:
    env["QEMU_CPU"] = cpu
    program = "import sojax; print(sojax.__file__, sojax.cpu_info())"
    print(f"{wheel.name} on {cpu}:", flush=True)
    _run(python, "-c", program, cwd=tests, env=env)
    _run(
      *(python, "-m", "pytest", "-q", "-o", f"cache_dir=.cache/{cpu}"),
      *("-m", "not slow"),
      *(_ONLY_SVE if cpu != _CPUS[0] else ()),
      *pytest_args,
      *files,
      cwd=tests,
      env=env,
    )


def main() -> None:
  """Reads the arguments and does what they say."""
  parser = argparse.ArgumentParser(
    description=__doc__.splitlines()[0],
    epilog="Further arguments of `test` go to pytest.",
  )
  parser.add_argument("action", choices=["wheel", "test"])
  parser.add_argument("--dir", type=pathlib.Path, required=True)
  parser.add_argument("--dist", type=pathlib.Path, required=True)
  args, pytest_args = parser.parse_known_args()
  directory = args.dir.resolve()
  if args.action == "test":
    run_tests(directory, args.dist, pytest_args)
  else:
    print(f"built {build_wheel(directory, args.dist)}")


if __name__ == "__main__":
  main()
