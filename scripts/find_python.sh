#!/usr/bin/env bash
# Prints the path of a Python that this project can use (3.12 to 3.14), and nothing else on standard output.
# A candidate counts only if it runs: a pyenv shim may exist for a version that is not selected or not installed.
set -u

check='import sys, venv, ensurepip; print(sys.executable) if (3, 12) <= sys.version_info < (3, 15) else sys.exit(1)'

for candidate in ${PYTHON:+"$PYTHON"} python3.13 python3.12 python3.14 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[234].*/bin/python3; do
    if found=$("$candidate" -c "$check" 2>/dev/null </dev/null) && [ -n "$found" ]; then
        echo "$found"
        exit 0
    fi
    if [ -n "${PYTHON:-}" ] && [ "$candidate" = "$PYTHON" ]; then
        echo "PYTHON=$PYTHON does not run as Python 3.12 to 3.14 with venv and pip; trying others." >&2
    fi
done

if command -v uv >/dev/null 2>&1; then
    echo "No Python 3.12 or newer here; asking uv for Python 3.13 (uv may download it)." >&2
    if uv python install --quiet 3.13 >&2 </dev/null && found=$(uv python find --no-project 3.13 2>/dev/null </dev/null); then
        echo "$found"
        exit 0
    fi
    echo "uv could not provide Python 3.13." >&2
fi

cat >&2 <<'TEXT'
This project needs Python 3.12 or newer, with its venv and ensurepip modules, and found none.
Install one (on Debian and Ubuntu: apt-get install python3 python3-venv), or install uv, or name one: make PYTHON=/path/to/python3 ...
TEXT
exit 1
