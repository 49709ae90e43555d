#!/bin/sh
# After the files are laid. dpkg: `configure [OLD-VERSION]` or an `abort-*` step; rpm: 1 at the first installation, 2 at an upgrade.
set -e
systemd-sysusers covenant.conf
systemd-tmpfiles --create covenant.conf
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
case "$1" in
    # The supervisor's socket, which root alone reaches. The daemon is started by `systemctl enable --now covenantd.socket`.
    # Also where a package was removed, which disabled the socket, and is installed again: dpkg names the former version.
    configure | 1) [ -e /run/covenant-upgrade ] || systemctl enable --now covenant-supervisor.socket ;;
esac
# What preremove.sh stopped for the upgrade.
if [ -e /run/covenant-upgrade ]; then
    xargs -r systemctl start </run/covenant-upgrade || true
    rm -f /run/covenant-upgrade
fi
