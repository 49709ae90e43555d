#!/bin/sh
# Before files go. dpkg: `remove`, `upgrade NEW-VERSION` or `deconfigure`; rpm: 0 at the removal, 1 at an upgrade, by
# then the new files are laid.
set -e
units="covenant-export.service covenantd.socket covenantd.service covenant-supervisor.socket covenant-supervisor.service"
if [ -d /run/systemd/system ]; then
    if [ "$1" != remove ] && [ "$1" != 0 ]; then
        for unit in $units; do
            if systemctl is-active --quiet "$unit"; then echo "$unit"; fi
        done >/run/covenant-upgrade
    else
        systemctl disable --quiet $units || true
    fi
    # Runs end here as `on_supervisor_exit` in config.toml says, each with its end in the audit log.
    systemctl stop $units || true
    if [ "$1" = 1 ]; then
        systemctl daemon-reload
        xargs -r systemctl start </run/covenant-upgrade || true
        rm -f /run/covenant-upgrade
    fi
fi
