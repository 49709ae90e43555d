#!/bin/sh
# chroot.sh ROOT CLONE COMMAND...: run a command in a tree that an image is made of, with the clone to be read at
# /srv/covenant. Started in namespaces of its own (image.py), so that the mounts end with it. /sys stays empty: what is
# there is this machine, and nothing in the tree is to look at it or to change it.
set -eu
root=$1
clone=$2
shift 2
mount -t proc proc "$root/proc"
mkdir -p "$root/srv/covenant"
mount --bind "$clone" "$root/srv/covenant"
mount -o remount,bind,ro "$root/srv/covenant"
exec chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
    DEBIAN_FRONTEND=noninteractive "$@"
