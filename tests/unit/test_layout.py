"""The namespace package holds together: three source roots, one `flatpeak`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("controller", "workers", "kernels")


def test_no_init_file_hides_a_source_root():
    for root in SOURCE_ROOTS:
        assert not (ROOT / root / "__init__.py").exists()
        assert not (ROOT / root / "flatpeak" / "__init__.py").exists()
        assert (ROOT / root / "flatpeak" / root / "py.typed").exists()


def imported_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted(m.split('.')[0] for m in sys.modules))"
    path = [str(ROOT / root) for root in SOURCE_ROOTS]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_errors_import_neither_torch_nor_ray():
    assert not imported_by("import flatpeak.workers.errors") & {"torch", "ray", "triton"}
