#!/bin/sh
# Before the files are laid. dpkg: `upgrade OLD-VERSION`; rpm, which refuses a downgrade itself: a number.
set -e
if [ "$1" = upgrade ] && dpkg --compare-versions "$2" gt "@VERSION@"; then
    echo "covenant: a downgrade from $2 to @VERSION@ is refused: the newer version may have changed what is in" >&2
    echo "/var/lib/covenant and /var/lib/covenantd." >&2
    echo "   fix: keep $2; or restore a backup made by @VERSION@: apt-get remove covenant, restore, install again" >&2
    exit 1
fi
