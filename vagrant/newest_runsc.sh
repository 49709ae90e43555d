#!/usr/bin/env bash
# gVisor's newest release of runsc, from gVisor's own signed package index, for the nightly run of gvisor-live.yml.
# apt checks the index against the key; the key itself comes over TLS from gVisor's site, as its documentation says
# (gvisor.dev/docs/user_guide/install), and its fingerprint is printed: no second public place was found that names it.
set -euo pipefail
keyring=/usr/share/keyrings/gvisor-archive-keyring.gpg
curl --fail --silent --show-error --location --proto '=https' https://gvisor.dev/archive.key | gpg --dearmor --yes -o "$keyring"
gpg --show-keys --with-fingerprint "$keyring"
cat >/etc/apt/sources.list.d/gvisor.sources <<SOURCE
Types: deb
URIs: https://storage.googleapis.com/gvisor/releases
Suites: release
Components: main
Architectures: $(dpkg --print-architecture)
Signed-By: $keyring
SOURCE
apt-get -q update
apt-get -qy install --no-install-recommends runsc
runsc --version
