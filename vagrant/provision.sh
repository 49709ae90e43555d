#!/usr/bin/env bash
# From an installed Debian or Ubuntu to a Covenant that was checked on it. One script, driven three ways:
#
#   make vm                the steps run where docs/virtual-machine.md says: host, image, guest without network
#   vagrant up             `all` in the machine, from a copy of the clone
#   gvisor-live.yml        `all` on a hosted runner
#
#   ./vagrant/provision.sh STEP...
#
#   packages      Debian packages and a runsc, from the machine's own mirrors           (network)
#   wheels        the Python packages of the locks by their hashes, into $WHEELS        (network)
#   package       Covenant as a .deb, and a newer one of the same files to upgrade to, into $BUILT  (network)
#   v2-only       from the next boot on, no cgroup controller is on version 1
#   no-kvm        from the next boot on, the kvm modules do not load
#   environment   /opt/covenant-tests, from $WHEELS alone
#   install       Covenant's .deb and its configuration, as an operator would
#   check         the suite of vagrant/tests; a skip is a failure
#   check-package  an upgrade, a downgrade and a purge of the .deb, then the wheel with `covenant setup`; last, since it
#                 leaves no Covenant behind
#   all           packages wheels package environment install check check-package
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."

# Where the wheels of the locks lie, which an image may hold for long, and Covenant's package, made from this clone.
: "${WHEELS:=/var/cache/covenant/wheels}" "${BUILT:=/var/cache/covenant/built}"
TESTS=/opt/covenant-tests
# What runs the suite, by its names in locks/dev.txt.
SUITE=(iniconfig packaging pluggy pygments pytest pytest-testinfra)
# In this order: what the machine is, then what it does.
CHECKED=(vagrant/tests/test_{machine,limits}.py tests/kernel/test_network_run.py::test_{granted_address_connects_and_others_are_refused,names_resolve_where_granted_and_lead_there_alone} tests/kernel/test_network_walls.py)
# What a machine with version 1 beside it cannot show: the freezer, the gates' own limits, who waits and who is suspended.
CHECKED+=(tests/kernel/test_freezer.py tests/kernel/test_gate_leaf.py::test_what_{takes_more_memory_in_it_is_killed,killed_keeper_left_of_it_is_emptied_and_removed} tests/kernel/test_standby.py::test_what_is_frozen_takes_no_processor_and_what_another_thaws_is_not_used tests/kernel/test_lifecycle.py::test_run_is_suspended_with_its_sentry_goes_on_after_and_is_ended)
PIP=(-m pip --disable-pip-version-check --no-input --quiet)
HASHED=(--require-hashes --no-deps --only-binary=:all:)

say() { printf '== %s\n' "$*"; }

# The entries of a lock with these names, hashes included.
part() { # LOCK NAME...
    local lock=$1
    shift
    awk -v names="$*" '
        BEGIN { wanted = split(names, list); for (i in list) want[list[i]] = 1 }
        /^[^ ]/ { split($1, name, "=="); keep = name[1] in want; found += keep }
        keep
        END { if (found != wanted) { print "not all of " names " are in the lock" > "/dev/stderr"; exit 1 } }
    ' "$lock"
}

packages() {
    /usr/bin/python3 -B vagrant/packages.py
}

wheels() {
    say "wheels of locks/ into $WHEELS"
    local work
    work=$(mktemp -d)
    mkdir -p "$WHEELS"
    part locks/dev.txt "${SUITE[@]}" >"$work/suite.txt"
    /usr/bin/python3 -m venv "$work/venv"
    for list in locks/runtime.txt "$work/suite.txt"; do
        "$work/venv/bin/python" "${PIP[@]}" --no-cache-dir download "${HASHED[@]}" -d "$WHEELS" -r "$list"
    done
    rm -r "$work"
}

# install_from LIST VENV: exactly what a list says, from $WHEELS and nowhere else.
install_from() {
    "$2/bin/python" "${PIP[@]}" install --no-index --find-links "$WHEELS" "${HASHED[@]}" -r "$1"
}

package() {
    say "Covenant's package into $BUILT"
    local work version next
    work=$(mktemp -d)
    mkdir -p "$BUILT"
    ./scripts/package --out "$BUILT" deb wheel
    # A newer version of the same files, packed quickly: what an upgrade does is in the package's scripts.
    version=$(dpkg-deb --field "$BUILT"/covenant_*.deb Version)
    next="$version+upgrade"
    dpkg-deb --raw-extract "$BUILT/covenant_${version}_$(dpkg --print-architecture).deb" "$work/tree"
    sed -i "s/^Version: .*/Version: $next/" "$work/tree/DEBIAN/control"
    sed -i "s/\"$version\"/\"$next\"/; s/to $version is/to $next is/" "$work/tree/DEBIAN/preinst"
    mkdir -p "$BUILT/newer"
    dpkg-deb --root-owner-group -Zgzip -z1 --build "$work/tree" "$BUILT/newer" >/dev/null
    rm -r "$work"
}

v2-only() {
    say "kernel command line: $(cat vagrant/cmdline)"
    install -d /etc/default/grub.d
    printf 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX %s"\n' "$(cat vagrant/cmdline)" >/etc/default/grub.d/covenant.cfg
    # The virtual machine of `make vm` has no boot loader: its kernel gets the same words from the same file.
    if command -v update-grub >/dev/null; then update-grub; fi
}

no-kvm() {
    say "no kvm from the next boot on"
    printf 'install %s /bin/false\n' kvm kvm_intel kvm_amd >/etc/modprobe.d/covenant-no-kvm.conf
}

environment() {
    say "$TESTS from locks/runtime.txt, for the suite"
    local list
    list=$(mktemp)
    part locks/dev.txt "${SUITE[@]}" >"$list"
    /usr/bin/python3 -m venv "$TESTS"
    install_from locks/runtime.txt "$TESTS"
    install_from "$list" "$TESTS"
    rm "$list"
}

install_covenant() {
    say "Covenant's package, with what it needs already there"
    dpkg --install "$BUILT"/covenant_*.deb
    # An emulated machine starts a sandbox in half a minute. The suite lowers a limit by hand, which attestation would find.
    printf 'start_deadline_seconds = 300\nattest_seconds = 1800\n' >/etc/covenant/config.toml
}

check() {
    say "the suite"
    # A test that cannot run is a failure here.
    export COVENANT_REQUIRE_KERNEL=1
    # Emulated in software: KVM would be `kvm`. The tests give each agent so many times more.
    # What the first test's run copied need not be copied again.
    if [ "$(systemd-detect-virt || true)" = qemu ]; then
        export COVENANT_SLOWNESS=10 COVENANT_WARM=/var/lib/covenant
    fi
    "$TESTS/bin/python" -m pytest -v -rP --durations=8 --color=no -p no:cacheprovider --hosts=local:// "${@:-${CHECKED[@]}}"
}

if [ "$(id -u)" != 0 ]; then
    printf '\nmissing: root\n   fix: sudo ./vagrant/provision.sh %s\n' "$*" >&2
    exit 1
fi
steps=("$@")
if [ "$*" = all ]; then steps=(packages wheels package environment install check check-package); fi
for step in "${steps[@]}"; do
    case $step in
        install) install_covenant ;;
        check-package) check vagrant/tests/test_{package,wheel}.py ;;
        packages | wheels | package | v2-only | no-kvm | environment | check) "$step" ;;
        *) printf 'no step `%s`\n' "$step" >&2; exit 2 ;;
    esac
done
