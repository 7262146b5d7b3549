"""Pictures for the README, of a real run: its report in a browser, and what `watch` shows of it.

`make screenshots` trains a small model on this machine for some minutes and writes into
`dashboards/images`. It needs Chromium on the PATH.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from driven_run import Driver, driving
from flatpeak.controller.demo import demo_spec
from flatpeak.controller.observed import FolderRun
from flatpeak.controller.spec import Spec, parse_spec
from flatpeak.controller.watch import Seen, picture

FOLDER = Path(__file__).parents[1] / "dashboards" / "images"
MOST_BYTES = 150_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDE, NARROW = (1280, 1180), (400, 1180)
COLUMNS = 80
STEPS, SEEN_AT = 40, 30


def main() -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is on the PATH")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        with driving(spec_of(Path(folder)), Path(folder)) as driver:
            terminal = watched(driver)
            ended = driver.end()
        if ended.code:
            sys.exit(f"the run ended with {ended.code}: {ended.err}")
        report = driver.run.path / "report.html"
        written = [write_terminal(terminal)]
        for width, size in {"wide": WIDE, "narrow": NARROW}.items():
            for scheme in ("light", "dark"):
                target = FOLDER / f"report-{width}-{scheme}.png"
                written.append(shoot(browser, report, target, size, dark=scheme == "dark"))
    for path in written:
        print(f"{path.relative_to(Path.cwd())}: {path.stat().st_size:,} bytes")
    if large := [path.name for path in written if path.stat().st_size > MOST_BYTES]:
        sys.exit(f"above {MOST_BYTES:,} bytes: {', '.join(large)}")


def spec_of(folder: Path) -> Spec:
    """The job of `make demo` on shorter sequences, with budgets to draw and snapshots to report."""
    spec = demo_spec("demo").model_dump()
    spec["runs_dir"] = str(folder / "runs")
    spec["data"]["cache_dir"] = str(folder / "cache")
    spec["train"] |= {"steps": STEPS, "sequence_length": 1024}
    spec["memory"] |= {"device_budget_bytes": "24MiB"}
    spec["memory"]["dispatch"] = {"budget_bytes": "3MiB"}
    spec["snapshots"] |= {"every_steps": 20}
    return parse_spec(spec)


def watched(driver: Driver) -> Console:
    """What a terminal of 80 columns shows of the run as it goes."""
    driver.wait_for(step=SEEN_AT)
    console, seen = Console(record=True, width=COLUMNS, file=io.StringIO()), Seen()
    for record in driver.run.follow()():
        seen(record)
    run = FolderRun(driver.run)
    console.print(picture(run.status(), seen, run.last_words()))
    return console


def write_terminal(console: Console) -> Path:
    target = FOLDER / "watch.svg"
    svg = console.export_svg(title="flatpeak watch demo")
    # A picture in a README loads nothing: without its fonts, text takes those of the reader.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    target.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")
    return target


def shoot(browser: str, page: Path, target: Path, size: tuple[int, int], *, dark: bool) -> Path:
    """The top of the page in a window of `size`."""
    width, height = size
    # Chromium lays out no narrower than 500 pixels, but a frame may be.
    frame = page.with_name("frame.html")
    style = f"position: fixed; inset: 0; border: 0; width: {width}px; height: {height}px"
    frame.write_text(
        '<!doctype html><meta name="color-scheme" content="light dark">'
        f'<iframe src="{page.name}" style="{style}"></iframe>'
    )
    subprocess.run(
        [
            browser,
            "--headless",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            "--disable-gpu",
            "--hide-scrollbars",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--window-size={width},{height}",
            f"--screenshot={target}",
            frame.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return target


if __name__ == "__main__":
    main()
