"""Compile a C++ source with the system's compiler, once for each compiler and CPU.

Libraries are kept in `$XDG_CACHE_HOME/flatpeak`, which is `~/.cache/flatpeak` without that
variable; where that cannot be written, each process makes its own. `CXX` names the compiler.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path

# No value depends on these but for contraction: where a product and a sum are one operation is
# for the source to say.
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=off"),
    *("-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"),
    # The widest vectors that there are; compilers stop at half of AVX-512's by themselves.
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
)
_TIMEOUT_S = 300


class CannotBuild(Exception):
    """There is no compiler, or it refuses the source; the message says which and why."""


def load_library(source: Path) -> CDLL:
    """Build `source` unless that was done before, and load it. Raises `CannotBuild`.

    Processes that come at once wait for one of them to build. A library appears under its name
    when it is whole.
    """
    compiler = _compiler()
    name = f"{source.parent.name}-{_key(source, compiler)}.so"
    with contextlib.suppress(OSError):  # no home, or none that can be written and executed from
        return _load_shared(source, compiler, _cache_folder() / name)
    try:
        with tempfile.TemporaryDirectory(prefix="flatpeak-") as folder:
            library = Path(folder) / name
            _publish(source, compiler, library)
            return CDLL(str(library))
    except OSError as error:
        raise CannotBuild(f"{name} can neither be kept nor loaded: {error}") from None


def _load_shared(source: Path, compiler: list[str], library: Path) -> CDLL:
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with _lock(library.with_suffix(".lock")):
            if not library.exists():
                _publish(source, compiler, library)
    return CDLL(str(library))


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise CannotBuild(f"there is no C++ compiler ({chosen[0] if chosen else 'c++'}); set CXX")


def _key(source: Path, compiler: list[str]) -> str:
    version = _run([*compiler, "--version"])
    parts = (source.read_text(), shlex.join((*compiler, *_FLAGS)), version, _cpu())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _cpu() -> str:
    """What tells this CPU from others that share the cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kinds = ("model", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "flatpeak"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "ab") as file:
        # Some network file systems have no locks: then two may build, and each publishes a whole.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _publish(source: Path, compiler: list[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="making-") as folder:
        made = Path(folder) / library.name
        _run([*compiler, *_FLAGS, str(source), "-o", str(made)])
        made.replace(library)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(str(error)) from None
    if done.returncode:
        raise CannotBuild(f"{shlex.join(command)} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
