#!/bin/sh
# Runs the program on processes that find each other through their environment, as torchrun would:
#
#   processes.sh 4 ./train_blocks --tp 2 --check
ranks=$1
shift
export WORLD_SIZE="$ranks" MASTER_ADDR=127.0.0.1 CROSSDOCK_JOB="$$"
export MASTER_PORT=$((20000 + $$ % 10000))
pids=""
rank=0
while [ "$rank" -lt "$ranks" ]; do
  RANK=$rank "$@" --communicator sockets &
  pids="$pids $!"
  rank=$((rank + 1))
done
status=0
for pid in $pids; do
  wait "$pid" || status=$?
done
exit $status
