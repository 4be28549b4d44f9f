#!/bin/sh
# enter_node.sh <node> <command>...: runs a command as if on that node: in its network namespace, with its hostname and
# process ids of its own, which all end with the command. mpirun takes this for ssh.
node=$1
shift
exec ip netns exec "$node" unshare --uts --pid --fork --kill-child --mount-proc \
  sh -c 'hostname "$0" && exec sh -c "$*"' "$node" "$@"
