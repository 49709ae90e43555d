#!/bin/sh
# After files are gone. Only `purge` of dpkg takes away what Covenant wrote: keys, packages, memory and the audit log.
set -e
if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
if [ "$1" = purge ]; then
    # One file system each: nothing below a mount that is still there.
    rm -rf --one-file-system /var/lib/covenant /var/lib/covenantd /var/lib/covenant-export /run/covenant
    rmdir --ignore-fail-on-non-empty /etc/covenant 2>/dev/null || true
fi
