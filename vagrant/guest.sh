#!/usr/bin/env bash
# In the virtual machine of `make vm`: the steps that are left, their output to the one virtio port, the status to the
# other, and then the machine is switched off. The host reads both; there is no network.
set -u
port=/dev/virtio-ports/covenant
exec >"$port.results" 2>&1
cd /srv/covenant
export HOME=/root LC_ALL=C.UTF-8 BUILT=/srv/covenant/built
printf '== %s, up for %s s, %s\n' "$(uname -r)" "$(cut -d' ' -f1 /proc/uptime)" "$(systemctl is-system-running)"
# Which suite: a word of the kernel's command line (scripts/virtual/guest.py).
suite=$(tr ' ' '\n' </proc/cmdline | sed -n 's/^covenant\.suite=//p')
./vagrant/provision.sh install "${suite:-check}"
status=$?
printf 'status %d\n' "$status" >"$port.status"
sync
systemctl poweroff --force
