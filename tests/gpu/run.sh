#!/bin/sh
# Run every device check of this checkout; each that passes leaves its report as JSON in the folder
# given, or in $OUT. PYTHON names the interpreter; by default the checkout's own, else python3.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
checkout=$(dirname "$(dirname "$here")")
out=${1:-${OUT:?name a folder for the reports, or set OUT}}
python=${PYTHON:-$checkout/.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
export PYTHONPATH="$checkout/controller:$checkout/workers:$checkout/kernels${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
trap 'rm -f "$out"/*.json.part' EXIT
failed=0
for check in "$here"/*.py; do
    report=$out/$(basename "$check" .py).json
    rm -f "$report"
    if "$python" "$check" --json >"$report.part"; then
        mv "$report.part" "$report"
    else
        echo "$check failed; it leaves no report" >&2
        failed=1
    fi
done
exit $failed
