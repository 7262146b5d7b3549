#!/bin/sh
# Run every device check and leave its report as JSON in the folder given, or in $OUT.
set -eu
here=$(dirname "$0")
out=${1:-${OUT:?name a folder for the reports, or set OUT}}
python=${PYTHON:-python3}
mkdir -p "$out"
failed=0
for check in "$here"/*.py; do
    "$python" "$check" --json >"$out/$(basename "$check" .py).json" || failed=1
done
exit $failed
