#!/bin/sh
# Run every device check of this checkout, each for at most LIMIT_S seconds (180 unless set).
#
#     tests/gpu/run.sh [FOLDER] [--cpu]
#
# Each leaves its report as NAME.json in FOLDER, or in $OUT; one that does not come to its end leaves
# none. PYTHON names the interpreter; by default the checkout's own, else python3.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
checkout=$(dirname "$(dirname "$here")")
case ${1:-} in --*) ;; ?*) OUT=$1 && shift ;; esac
: "${OUT:?name a folder for the reports, or set OUT}"
python=${PYTHON:-$checkout/.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
for root in tests kernels workers controller; do
    PYTHONPATH="$checkout/$root${PYTHONPATH:+:$PYTHONPATH}"
done
export PYTHONPATH
mkdir -p "$OUT"
failed=0
for check in "$here"/*.py; do
    name=$(basename "$check" .py)
    [ "$name" != frame ] || continue
    rm -f "$OUT/$name.json"
    code=0
    timeout -k 10 "${LIMIT_S:-180}" "$python" "$check" --out "$OUT/$name.json" "$@" || code=$?
    case $code in
    0) ;;
    124 | 137) failed=1 && echo "$name did not end within ${LIMIT_S:-180} s" >&2 ;;
    *) failed=1 && echo "$name failed with exit code $code" >&2 ;;
    esac
done
exit $failed
