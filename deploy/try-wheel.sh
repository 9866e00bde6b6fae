#!/usr/bin/env bash
# Try a wheel as a new user would: a virtual environment with nothing in it, a folder without the repository, one command.
#   deploy/try-wheel.sh PYTHON WHEEL CONSTRAINTS [PIP ARGUMENTS …]
set -euo pipefail
python=$1 wheel=$(realpath "$2") constraints=$(realpath "$3")
shift 3
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
unset PYTHONPATH
"$python" -m venv "$place/venv"
bin="$place/venv/bin"
# Torch first and alone, as `make setup` does, so that nothing else decides which build is installed.
torch=$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' "$constraints")
"$bin/python" -m pip install --disable-pip-version-check --quiet "$@" "$torch"
"$bin/python" -m pip install --disable-pip-version-check --quiet "$@" -c "$constraints" "$wheel"
"$bin/python" -m pip check
cd "$place"
printf 'It was the best of times, it was the worst of times. %.0s' {1..200} >text.txt
for model in books-6m books-6m-chapters; do
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$bin/dist-attn" encode text.txt --out "$model.npy" --model "$model"
    "$bin/python" -c "import numpy, sys; rows = numpy.load(sys.argv[1]); print(sys.argv[1], rows.shape); assert len(rows)" \
        "$model.npy"
done
"$bin/dist-attn" --help | grep --quiet encode
"$bin/dist-attn" help window >/dev/null
"$bin/dist-attn" plan --tokens 1M >/dev/null
echo "the wheel works by itself"
