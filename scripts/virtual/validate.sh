#!/bin/sh
# validate.sh ROOT CLONE: what a real vagrant says of vagrant/Vagrantfile, and that it sees a key that is misspelt.
# It is installed over the tree of an image, in memory: nothing of it goes into the image.
set -eu
root=$1
clone=$2
work=$root.over
mkdir "$work"
mount -t tmpfs -o mode=0755 tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay overlay -o "lowerdir=$root,upperdir=$work/upper,workdir=$work/work" "$work/root"
"$clone/scripts/virtual/chroot.sh" "$work/root" "$clone" /bin/sh -euc '
apt-get -qy install --no-install-recommends vagrant >/dev/null
mkdir -p /srv/try
cp /srv/covenant/vagrant/Vagrantfile /srv/try
cd /srv/try
vagrant validate --ignore-provider
sed -i s/boot_timeout/boot_timeoot/ Vagrantfile
if vagrant validate --ignore-provider >said 2>&1; then echo "a misspelt key was taken"; exit 1; fi
grep -q boot_timeoot said'
