#!/usr/bin/env bash
# Builds Horovod 0.28.1 with MPI for the `python` and `mpicxx` on PATH, and installs it there.
#
#   scripts/build_horovod.sh [--gpu]
#
# Run in an activated environment that has requirements.txt installed (setup.sh and environment.yml's users do).
# 4-5 minutes the first time; the wheel is kept under ~/.cache/pushreduce (XDG_CACHE_HOME moves it), keyed by
# PyTorch, MPI, Python and the edits to the source, so that it takes seconds afterwards.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/environment.sh
source "$root/scripts/environment.sh"
version=0.28.1
sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0

gpu=()
case ${1-} in
  "") ;;
  --gpu) gpu=(--gpu) ;;
  *) refuse "unknown option $1; usage: scripts/build_horovod.sh [--gpu]" ;;
esac

command -v mpicxx >/dev/null || fail "no mpicxx on PATH; run scripts/setup.sh, which installs one"
mpicxx --version >/dev/null 2>&1 ||
  fail "$(command -v mpicxx) finds no C++ compiler; install one (Debian: apt-get install g++; conda: conda install compilers)"
command -v make >/dev/null || fail "no make on PATH; install it (Debian: apt-get install make; conda: conda install make)"
python -c 'import torch, cffi, psutil, yaml, cloudpickle, packaging, setuptools, wheel' 2>/dev/null ||
  fail "$(command -v python) lacks packages that Horovod is built with; run: pip install -r requirements.txt"

# The MPI library that mpicxx links with, links resolved (Debian's and conda's names point elsewhere).
mpi_library=$(
  python - "$(mpicxx -show 2>/dev/null || mpicxx --showme)" "$(mpicxx -print-file-name=libmpi.so)" <<'PY'
import glob, os, sys
link_line, default = sys.argv[1].split(), sys.argv[2]
for directory in [word[2:] for word in link_line if word.startswith("-L")] + [os.path.dirname(default)]:
    for path in sorted(glob.glob(directory + "/libmpi.so*") + glob.glob(directory + "/libmpich.so*")):
        # libmpi.so may be a text for the linker.
        if open(path, "rb").read(4) == b"\x7fELF":
            sys.exit(print(os.path.realpath(path)))
PY
)
[ -n "$mpi_library" ] || fail "cannot find the library that $(command -v mpicxx) links with; use another MPI (scripts/setup.sh --mpi mpich)"
library_dir=$(dirname "$mpi_library")

torch_version=$(python -c 'import torch; print(torch.__version__)')
# Inside the environment the library is found relative to Horovod, so that the wheel serves any environment.
rpath=$(
  python - "$library_dir" <<'PY'
import os, sys, sysconfig
library_dir, prefix = sys.argv[1], os.path.realpath(sys.prefix)
if library_dir.startswith(prefix + os.sep):
    horovod = os.path.join(os.path.realpath(sysconfig.get_path("platlib")), "horovod", "torch")
    library_dir = "$ORIGIN/" + os.path.relpath(library_dir, horovod)
print(library_dir)
PY
)
key="horovod $version
torch $torch_version
mpi $(mpirun --version 2>&1 | grep -m1 -oE 'Open MPI\) [0-9.]+|Version: +[0-9.]+|Version [0-9.]+' | tr -s ' ') rpath $rpath
python $(python -c 'import sys, sysconfig; print(sys.implementation.cache_tag, sysconfig.get_platform())')
operations ${gpu[*]:-cpu}
edits $(sha256sum <"$root/scripts/horovod_edits.py" | cut -c1-16)"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/pushreduce
wheel_dir=$cache/horovod-$version-$(sha256sum <<<"$key" | cut -c1-12)

# PyTorch brings NCCL; its library has no name without a version, which the linker looks for.
nccl_of_torch() {
  local nccl
  nccl=$(python -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null) || return 0
  mkdir "$1/nccl"
  ln -s "$nccl/lib/libnccl.so.2" "$1/nccl/libnccl.so"
  export HOROVOD_NCCL_INCLUDE=$nccl/include HOROVOD_NCCL_LIB=$1/nccl
  # shellcheck disable=SC2016
  rpath+=';$ORIGIN/../../nvidia/nccl/lib'
  export HOROVOD_RPATH=$rpath
}

built() { grep -oE '\[ *[0-9]+%\]' "$log" | tail -1 | tr -dc 0-9 | sed 's/$/ % compiled/'; }

build() {
  { mkdir -p "$cache" && [ -w "$cache" ]; } 2>/dev/null ||
    fail "cannot write to the cache $cache; make it writable or set XDG_CACHE_HOME to a directory that is"
  work=$(mktemp -d "$cache/build-XXXXXX")
  trap 'rm -rf "$work"' EXIT
  echo "horovod==$version --hash=sha256:$sha256" >"$work/requirement.txt"
  log=$cache/build-horovod.log
  echo "      fetching the source of Horovod $version"
  python -m pip download --quiet --no-deps --no-binary horovod --no-build-isolation -d "$work" -r "$work/requirement.txt"
  tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
  python "$root/scripts/horovod_edits.py" "$work/horovod-$version" --torch "$torch_version" "${gpu[@]}" >"$log"

  # One compiler process takes up to 2 GB.
  jobs=$(python -c 'import os, psutil; print(max(1, min(os.cpu_count(), psutil.virtual_memory().total >> 31)))')
  if ! command -v cmake >/dev/null; then
    echo "      fetching CMake"
    python -m pip install --quiet --target "$work/cmake" cmake==3.31.6
    export PYTHONPATH=$work/cmake${PYTHONPATH:+:$PYTHONPATH} PATH=$work/cmake/bin:$PATH
  fi
  export CMAKE_POLICY_VERSION_MINIMUM=3.5 MAKEFLAGS=-j$jobs HOROVOD_RPATH=$rpath
  # Without gloo none of its headers is compiled either, so the <cstdint> that gcc 15 wants there needs no edit.
  export HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 HOROVOD_WITH_PYTORCH=1
  export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
  unset HOROVOD_GPU_OPERATIONS
  if [ ${#gpu[@]} != 0 ]; then
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED
    nccl_of_torch "$work"
  fi
  echo "      building with $(command -v mpicxx), $jobs compilers at a time: 2-6 minutes; log: $log"
  with_progress "$log" built python -m pip wheel -v --no-deps --no-build-isolation -w "$work/wheel" \
    "$work/horovod-$version" || {
    grep -E 'error|Error' "$log" | tail -n 5 >&2
    fail "Horovod did not build with $(command -v mpicxx); log: $log"
  }
  found=$(sed -n 's/.*Found MPI_CXX: \([^ ]*\).*/\1/p' "$log" | tail -1)
  [ "$(dirname "$(realpath "$found")")" = "$library_dir" ] ||
    fail "CMake found the MPI library $found, but $(command -v mpicxx) links with $mpi_library: take the other MPI off PATH"
  echo "$key" >"$work/wheel/key.txt"
  mv -T "$work/wheel" "$wheel_dir" 2>/dev/null || [ -f "$wheel_dir/key.txt" ] # another build may have won
}

[ -f "$wheel_dir/key.txt" ] || build
# shellcheck disable=SC2144
python -m pip install --quiet --no-deps --no-index --force-reinstall "$wheel_dir"/horovod-*.whl

report=$(horovodrun --check-build)
for part in PyTorch MPI; do
  grep -qF "[X] $part" <<<"$report" || fail "Horovod was built without $part; remove $wheel_dir and run again"
done

# mpi4py's wheel takes the first libmpi that it finds. Where that is not mpicxx's, it is compiled with mpicc instead.
mpi4py_uses_it() {
  PYTHONPATH=$root/src python - "$mpi_library" <<'PY'
import sys
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from pushreduce.communication.mpi_settings import mpi_libraries
sys.exit(mpi_libraries(open("/proc/self/maps").read()) != [sys.argv[1]])
PY
}
if ! mpi4py_uses_it 2>/dev/null; then
  echo "      compiling mpi4py with $(command -v mpicc)"
  mpi4py=$(grep -i '^mpi4py==' "$root/requirements.txt")
  MPICC=$(command -v mpicc) python -m pip install --quiet --no-deps --no-cache-dir --force-reinstall --no-binary mpi4py "$mpi4py"
  mpi4py_uses_it || fail "mpi4py does not load $mpi_library, which $(command -v mpicxx) links with"
fi
echo "      Horovod $version installed"
