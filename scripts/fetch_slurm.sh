#!/usr/bin/env bash
# Unpacks Debian's Slurm into VENV/slurm/, for tests/cluster; nothing is installed.
set -euo pipefail

packages=(slurmctld slurmd slurm-client munge)

if [ $# -ne 1 ] || [ ! -x "$1/bin/python" ]; then
    echo "usage: scripts/fetch_slurm.sh VENV   (a virtual environment that exists)" >&2
    exit 2
fi
folder=$1/slurm
[ ! -d "$folder" ] || exit 0
if command -v slurmctld slurmd sbatch munged >/dev/null; then
    echo "fetch: this machine already has Slurm"
    exit
fi
if ! command -v apt-get dpkg-deb >/dev/null; then
    echo "fetch: this machine has no apt-get: install slurmctld, slurmd and munged" >&2
    exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{archives,lists}/partial

# download [OPTION...]: the packages and their dependencies that this machine lacks
download() {
    timeout 300 apt-get -q -q -y "$@" -o Dir::Cache="$work" -o Debug::NoLocking=1 \
        -o APT::Sandbox::User=root --no-install-recommends --download-only install "${packages[@]}"
}

echo "fetch: Slurm, by apt-get"
# A machine that has not run `apt-get update` for a long time may not know any package.
fresh=(-o "Dir::State::Lists=$work/lists" -o Acquire::Languages=none)
download || {
    timeout 300 apt-get -q -q "${fresh[@]}" -o Debug::NoLocking=1 -o APT::Sandbox::User=root update
    download "${fresh[@]}"
}
# Under another name until it is complete.
rm -rf "$folder.part"
for package in "$work"/archives/*.deb; do
    dpkg-deb --extract "$package" "$folder.part"
done
mv "$folder.part" "$folder"
