#!/bin/sh
# usage: setup_venv.sh VENV      creates or reuses the virtual environment, and installs what kvpager needs
#        setup_venv.sh --check   only looks whether the tools are there
#
# Says in one line what is missing and how to get it.
set -eu

need() { # need COMMAND WHAT HOW
    command -v "$1" >/dev/null 2>&1 || { echo "kvpager: $2 is missing: $3" >&2; exit 1; }
}

need cargo "the Rust toolchain (cargo)" "install it with rustup, see https://rustup.rs"
if ! command -v "${CXX:-c++}" >/dev/null 2>&1; then
    echo "kvpager: a C++ compiler is missing: install g++ (Debian, Ubuntu: apt-get install g++) or set CXX" >&2
    exit 1
fi
[ "$1" = "--check" ] && exit 0

venv=$1
if [ ! -x "$venv/bin/python" ]; then
    python=
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "kvpager: Python 3.11 or newer (with venv) is missing: install it" \
            "(Debian, Ubuntu: apt-get install python3 python3-venv) or set PYTHON" >&2
        exit 1
    fi
    echo "creating $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi

echo "installing what kvpager builds and runs with into $venv (torch is large: the first time takes minutes)"
"$venv/bin/python" tools/requirements.py > "$venv/requirements.txt"
"$venv/bin/python" -m pip install --quiet --requirement "$venv/requirements.txt"
