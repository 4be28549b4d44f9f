#!/bin/sh
# enter_node.sh <node> <command>...: runs a command as if on that node: in its network namespace, with its hostname and
# its own process namespace, whose processes all end with the command. mpirun uses this script instead of ssh.
node=$1
shift
exec ip netns exec "$node" unshare --uts --pid --fork --kill-child --mount-proc \
  sh -c 'hostname "$0" && exec sh -c "$*"' "$node" "$@"
