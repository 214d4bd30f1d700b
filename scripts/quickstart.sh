#!/usr/bin/env bash
# From a fresh checkout to a trained model: sets up what is missing, then trains LASGD on 4 local ranks on
# scikit-learn's digits (nothing is downloaded for it; under a minute after the set-up).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/environment.sh
source "$root/scripts/environment.sh"

"$root/scripts/setup.sh"
enter_environment "$root/.venv"
cd "$root"
run=runs/quickstart-$(date +%Y%m%d-%H%M%S)
mpirun -np 4 python src/train.py --run-dir "$run"
echo
echo "run       $root/$run"
echo "picture   $root/$run/curves.png"
echo "look at it with:  source .venv/bin/activate && tensorboard --logdir $run/tensorboard"
