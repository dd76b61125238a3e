#!/bin/sh
# Targets of the Makefile in fresh clones of the last commit: one clone for every Python found, with the newest
# dependencies and with the oldest that pyproject.toml allows. Where no CPU build of torch can be had, each clone takes
# gigabytes. Prints one line per clone and target; exits with 1 if a target failed. Logs stay in OUT.
#
# Variables: UV (the program), PYTHONS, DEPENDENCIES, TARGETS, OUT.
set -eu
unset MAKEFLAGS MFLAGS MAKELEVEL VIRTUAL_ENV  # a make that runs this would override the interpreter
root=$(cd "$(dirname "$0")/.." && pwd)
out=${OUT:-$(mktemp -d)} passed= failed=
mkdir -p "$out"
for version in ${PYTHONS:-3.11 3.12 3.13 3.14}; do
  if ! python=$("$UV" python find --no-python-downloads --no-project "$version" 2>/dev/null); then
    echo "$version: not found on this machine, skipped"
    continue
  fi
  for kind in ${DEPENDENCIES:-newest oldest}; do
    clone=$out/$version-$kind
    unset PIP_CONSTRAINT UV_CONSTRAINT
    if [ "$kind" = oldest ]; then  # the oldest release of each direct dependency that has a wheel for this interpreter
      "$UV" pip compile --quiet --resolution lowest-direct --only-binary :all: --python "$python" \
        --extra test --extra eval --extra ray --extra browser --output-file "$clone.txt" "$root/pyproject.toml"
      export PIP_CONSTRAINT="$clone.txt" UV_CONSTRAINT="$clone.txt"
    fi
    git clone --quiet "$root" "$clone"
    for target in ${TARGETS:-caption test}; do
      if make -C "$clone" "$target" PYTHON="$python" >>"$clone.log" 2>&1; then
        result=passed passed=yes
      else
        result=failed failed=yes
      fi
      echo "$version, $kind dependencies, make $target: $result"
    done
    "$clone/.venv/bin/python" -m pip list >>"$clone.log" 2>&1 || true
    rm -rf "$clone"
  done
done
echo "logs: $out"
[ -n "$passed" ] && [ -z "$failed" ]
