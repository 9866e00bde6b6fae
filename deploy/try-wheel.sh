#!/usr/bin/env bash
# Try the wheels as new users would: virtual environments with nothing in them, a folder without the repository, a few commands.
#   deploy/try-wheel.sh PYTHON WHEEL CLIENT_WHEEL CONSTRAINTS [PIP ARGUMENTS …]
set -euo pipefail
python=$1 wheel=$(realpath "$2") client=$(realpath "$3") constraints=$(realpath "$4")
shift 4
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
for model in writer-12m minilm-stream; do
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$bin/dist-attn" encode text.txt --out "$model.npy" --model "$model"
    "$bin/python" -c "import numpy, sys; rows = numpy.load(sys.argv[1]); print(sys.argv[1], rows.shape); assert len(rows)" \
        "$model.npy"
done
"$bin/dist-attn" --help | grep --quiet encode
"$bin/dist-attn" help window >/dev/null
"$bin/dist-attn" plan --tokens 1M >/dev/null
echo "the wheel works by itself"

# The client encodes the same text by the service of the first environment.
"$python" -m venv "$place/client"
began=$SECONDS
"$place/client/bin/python" -m pip install --disable-pip-version-check --quiet "$@" -c "$constraints" "$client"
"$place/client/bin/python" -m pip check
du -sm "$place"/client/lib/python*/site-packages | sed "s/\t.*/ MB of site-packages in $((SECONDS - began)) s/"
port=$("$python" -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
"$bin/dist-attn" serve --port "$port" --data-dir "$place/data" >"$place/serve.log" 2>&1 &
service=$!
trap 'kill "$service"; wait "$service"; rm -rf "$place"' EXIT
"$place/client/bin/python" - "$port" <<'END'
import sys
from pathlib import Path

from dist_attn_client import Client, Retry

# It is sent again until the engine has started.
with Client(f"http://127.0.0.1:{sys.argv[1]}", retry=Retry(tries=60)) as client:
    rows = list(client.encode(Path("text.txt"), window=512, deadline_s=120))
print("by the client", (len(rows), len(rows[0].embedding)))
assert {"torch", "dist_attn", "fastapi"}.isdisjoint(sys.modules)
END
echo "the client works by itself"
