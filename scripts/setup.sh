#!/usr/bin/env bash
# Makes .venv: Python 3.11, the pinned packages, and this project in it. Does nothing when it is up to date.
# Needs python3.11 and pip; no root, no compiler, no GPU. PYTHON=… names another Python 3.11.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Byte code must be cached (without it vLLM recompiles for most of a minute at every start), and nobody's pip settings or
# packages of the user may leak in.
unset PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER PIP_REQUIRE_VIRTUALENV VIRTUAL_ENV
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONNOUSERSITE=1

venv=.venv
stamp=$venv/.nbehind-setup
say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

# What the environment is made from. The place counts too: a venv cannot be moved.
wanted=$({ pwd; cat requirements/*.txt scripts/setup.sh pyproject.toml; } | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x $venv/bin/nbehind ]; then
  exit 0
fi

python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || die "$python is not there: install Python 3.11, or name it with PYTHON=/path/to/python3.11"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
  die "$python is $("$python" -V 2>&1), but Python 3.11 is needed: name it with PYTHON=/path/to/python3.11"

started=$SECONDS
rm -f "$stamp"
if [ -x $venv/bin/python ] && ! $venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
  say "the old $venv is broken; making it anew"
  rm -rf $venv
fi
if [ ! -x $venv/bin/python ]; then
  say "making $venv with $("$python" -V 2>&1)"
  "$python" -m venv $venv 2>/dev/null || {
    # Debian without python3-venv: no ensurepip, but a pip that can install into another environment
    rm -rf $venv
    "$python" -m venv --without-pip $venv || die "no virtual environment could be made; on Debian: apt-get install python3.11-venv"
  }
fi
if $venv/bin/python -m pip --version >/dev/null 2>&1; then
  pip=($venv/bin/python -m pip)
else
  "$python" -m pip --version >/dev/null 2>&1 || die "no pip: install it for $python"
  pip=("$python" -m pip --python $venv/bin/python)
fi

install() { "${pip[@]}" install --quiet --no-compile "$@" || die "pip failed (its message is above); check network and disk space, then run 'make setup' again"; }
say "installing torch (requirements/torch.txt)"
install -r requirements/torch.txt
say "installing vLLM and the rest (requirements/base.txt, vllm.txt, dev.txt); 3 to 4 GB, a few minutes"
install --no-deps -r requirements/base.txt -r requirements/vllm.txt -r requirements/dev.txt
say "installing this project (editable)"
install --no-deps --no-build-isolation --editable .
say "compiling to byte code, on all cores"
# (fails for the templates of other Python versions that some packages carry; nothing depends on those)
$venv/bin/python -m compileall -q -j 0 $venv/lib/python3.11/site-packages nbehind rollout_queue weight_sync producer_svc trainer_svc >/dev/null 2>&1 || true
$venv/bin/nbehind config >/dev/null || die "the installed nbehind does not start"

printf '%s\n' "$wanted" >"$stamp"
say "done in $((SECONDS - started)) s; try: make demo"
