#!/usr/bin/env bash
# Serves an engine from Triton Inference Server: run/serve_triton.sh --help
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
if [[ ! -x "$python" ]]; then
  python="$(command -v python3 || true)"
fi
if [[ -z "$python" ]] || ! PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$python" -c 'import trt_redknot.serving.triton_launch' 2>/dev/null; then
  echo "error: no Python that can import trt_redknot, tried ${python:-python3}. Run make venv, or set PYTHON." >&2
  exit 2
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m trt_redknot.serving.triton_launch "$@"
