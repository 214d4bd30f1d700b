#!/usr/bin/env bash
# Fetches Fashion-MNIST from Debian's package dataset-fashion-mnist, without root, into data/fashion-mnist of the
# working directory (or the directory given). Elsewhere: `python src/train.py --dataset fashion-mnist --download`.
#
#   scripts/get_fashion_mnist.sh [DIRECTORY]
set -euo pipefail

case ${1-} in
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '/^set /d'; exit ;;
    -*) echo "get_fashion_mnist.sh: unknown option $1: give a directory, or nothing" >&2; exit 2 ;;
esac
target=${1:-data/fashion-mnist}
package=dataset-fashion-mnist
files=(train-images-idx3-ubyte.gz train-labels-idx1-ubyte.gz t10k-images-idx3-ubyte.gz t10k-labels-idx1-ubyte.gz)

fail() { echo "get_fashion_mnist.sh: $1" >&2; exit 1; }

complete() { for file in "${files[@]}"; do [[ -s $target/$file ]] || return 1; done; }

if complete; then echo "Fashion-MNIST is in $target"; exit 0; fi
for tool in apt-get dpkg-deb; do
    command -v "$tool" > /dev/null ||
        fail "no $tool here: use --dataset fashion-mnist --download, or copy the four .gz files to $target"
done

mkdir -p "$target" || fail "cannot write to $target: name another directory"
unpacked=$(mktemp -d "$target/.unpack.XXXXXX")
trap 'rm -rf "$unpacked"' EXIT
(cd "$unpacked" && apt-get -q -o APT::Sandbox::User=root download "$package") ||
    fail "apt-get knows no package $package: run 'apt-get update' (as root), or add Debian's section main"
dpkg-deb -x "$unpacked/$package"_*.deb "$unpacked"
for file in "${files[@]}"; do
    # Renamed into place, so that a file with its final name is a whole one.
    mv "$unpacked/usr/share/datasets/fashion-mnist/$file" "$target/$file"
done
complete || fail "the package did not hold all of: ${files[*]}"
echo "Fashion-MNIST is in $target"
