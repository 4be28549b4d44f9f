#!/bin/sh
# Runs the example on four processes, which find each other through files:
#
#   06_c_api.sh ./06_c_api [--device cuda]
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
pids=""
for rank in 0 1 2 3; do
  "$@" $rank 4 "$folder" &
  pids="$pids $!"
done
status=0
for pid in $pids; do
  wait "$pid" || status=$?
done
exit $status
