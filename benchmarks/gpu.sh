#!/bin/sh
# On a machine with an NVIDIA GPU, without a network: benchmarks/gpu.sh [--json FILE] [--batch 16] [--rounds 5]
# To see that it runs at all, anywhere: benchmarks/gpu.sh --try
# PYTHON names another interpreter than python3.
set -eu
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
"$PYTHON" - <<'END'
import importlib.util, sys

OURS = {
    "jax": "jax[cuda12]", "flax": "flax", "optax": "optax", "orbax": "orbax-checkpoint", "grain": "grain",
    "ml_collections": "ml_collections", "absl": "absl-py", "numpy": "numpy", "tensorboardX": "tensorboardX",
    "tqdm": "tqdm",
}
PEERS = {"torch": "torch", "transformers": "transformers"}


def missing(packages):
    return [package for module, package in packages.items() if importlib.util.find_spec(module) is None]


if missing(PEERS):
    print(f"without the peer, which needs {' and '.join(missing(PEERS))}: ours alone is measured", file=sys.stderr)
if missing(OURS):
    sys.exit(f"error: Python packages are missing here, without which nothing can be measured: {' '.join(missing(OURS))}")
END
if command -v nvidia-smi >/dev/null; then nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader; fi
exec "$PYTHON" -m benchmarks.gpu "$@"
