#!/usr/bin/env bash
# changed.sh BASE: `machine=yes` when something changed since BASE that a real machine has to see, else `machine=no`.
# Without a base that is here (a schedule, a new branch, a rewritten one) the answer is yes.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
base=${1:-}
if git rev-parse --quiet --verify "$base^{commit}" >/dev/null &&
    git diff --quiet "$base" HEAD -- policy sandbox agents vagrant covenant tests locks scripts .github; then
    echo machine=no
else
    echo machine=yes
fi
