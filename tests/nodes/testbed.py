#!/usr/bin/env python3
"""Nodes on one machine: network namespaces with their own hostnames, joined by two bridges, and ranks on them.

    tests/nodes/testbed.py 2,1,1 build/release/crossdock run --strategy hierarchical    # two ranks on the first of three nodes
    tests/nodes/testbed.py --sockets 2,2 build/release/crossdock run                    # without MPI

Everything lives in one unnamed network, mount and process namespace, which the kernel removes with the process that made
it, however that process ends: nothing has to be cleaned up, and nothing can be left behind.
"""

import argparse
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
INSIDE = "CROSSDOCK_TESTBED"  # set in the environment of everything that runs in the namespaces
MISSING_RIGHTS = 77  # the exit status that ctest reports as skipped


def namespace_command():
    """The command that runs a program in new namespaces, whose processes all end with it."""
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    kinds = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    return ["unshare", *as_root, *kinds]


MPI_TOOLS = ("mpirun", "orted")


def why_not(tools):
    """Why namespaces cannot be made here, or which of these tools is missing; None if nothing is missing."""
    for tool in ("unshare", "ip", *tools):
        if shutil.which(tool) is None:
            return f"there is no {tool} on the PATH (Debian: util-linux, iproute2, openmpi-bin)"
    trial = "mount -t tmpfs none /run && mkdir /run/netns && ip netns add node0 && ip netns exec node0 unshare --uts --pid " \
            "--fork --mount-proc hostname node0 && ip link add switch0 type bridge && " \
            "ip link add data0 type veth peer name data netns node0"
    result = subprocess.run([*namespace_command(), "sh", "-c", trial], capture_output=True, text=True, timeout=300)
    return None if result.returncode == 0 else "no rights to make namespaces: " + result.stderr.strip()


def enter_or_skip(tools=MPI_TOOLS):
    """Continues in new namespaces, or exits as skipped."""
    if INSIDE in os.environ:
        subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
        return
    reason = why_not(tools)
    if reason:
        print(f"skipped: {reason}")
        sys.exit(MISSING_RIGHTS)
    sys.stdout.flush()
    os.environ[INSIDE] = str(os.getpid())
    die_with_parent = ctypes.CDLL(None).prctl  # unshare itself ignores SIGTERM
    inside = subprocess.Popen([*namespace_command(), sys.executable, *sys.argv],
                              preexec_fn=lambda: die_with_parent(1, signal.SIGKILL))  # 1: PR_SET_PDEATHSIG
    sys.exit(inside.wait())


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def processes_here():
    """The other processes in this process namespace."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            pass  # it has just ended
    return found


class MpiJob:
    """MPI processes on some of the nodes, started by mpirun on the first of them."""

    def __init__(self, ranks_per_node, command, environment):
        hosts = ",".join(f"node{i}:{ranks}" for i, ranks in enumerate(ranks_per_node))
        settings = {"plm_rsh_agent": HERE / "enter_node.sh", "oob_tcp_if_include": "mgmt", "pml": "ob1",
                    "btl": "self,vader,tcp", "btl_tcp_if_include": "data", "mpi_yield_when_idle": 1}
        launch = ["mpirun", "--allow-run-as-root", "--leave-session-attached", "--enable-recovery", "--bind-to", "none",
                  "--host", hosts, "-np", str(sum(ranks_per_node))]
        for name, value in settings.items():
            launch += ["--mca", name, str(value)]
        for name, value in environment.items():
            launch += ["-x", f"{name}={value}"]
        self.files = [tempfile.TemporaryFile("w+") for _ in range(2)]
        self.process = subprocess.Popen([HERE / "enter_node.sh", "node0", *launch, *map(str, command)],
                                        stdin=subprocess.DEVNULL, stdout=self.files[0], stderr=self.files[1])

    def wait(self, limit_s=None):
        """Waits until it ends. Returns the exit status, None if it had to be killed. Sets `output` and `errors`."""
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
            self.process.kill()
            self.process.wait()
        for file in self.files:
            file.seek(0)
        self.output, self.errors = (file.read() for file in self.files)
        for file in self.files:
            file.close()
        return status


class SocketsJob:
    """Processes on some of the nodes that find each other by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

    PORT = 29500

    def __init__(self, ranks_per_node, command, environment):
        common = {"WORLD_SIZE": sum(ranks_per_node), "MASTER_ADDR": data_address(0), "MASTER_PORT": self.PORT, **environment}
        words = " ".join(shlex.quote(str(word)) for word in command)
        self.files = [tempfile.TemporaryFile("w+") for _ in range(2)]
        self.nodes = []
        rank = 0
        for node, num_ranks in enumerate(ranks_per_node):
            script = "pids=; status=0; "
            for _ in range(num_ranks):
                script += f"RANK={rank} {words} & pids=\"$pids $!\"; "
                rank += 1
            script += "for pid in $pids; do wait $pid || status=$?; done; exit $status"
            self.nodes.append(subprocess.Popen([HERE / "enter_node.sh", f"node{node}", script], stdin=subprocess.DEVNULL,
                                               stdout=self.files[0], stderr=self.files[1],
                                               env={**os.environ, **{name: str(value) for name, value in common.items()}}))

    def process_of(self, rank):
        """The process id of a rank in this namespace; None if it is not running."""
        for pid in processes_here():
            try:
                variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            except OSError:
                continue
            if f"RANK={rank}" in variables and name != "sh":
                return pid
        return None

    def wait(self, limit_s=None):
        """Waits until it ends. Returns the largest exit status of a node, None if it had to be killed. Sets `output`
        and `errors`."""
        end = None if limit_s is None else time.monotonic() + limit_s
        status = 0
        for node in self.nodes:
            try:
                ended = node.wait(None if end is None else max(0.0, end - time.monotonic()))
                status = None if status is None else max(status, ended)
            except subprocess.TimeoutExpired:
                status = None
        for node in self.nodes:
            node.kill()
            node.wait()
        for file in self.files:
            file.seek(0)
        self.output, self.errors = (file.read() for file in self.files)
        for file in self.files:
            file.close()
        return status


def data_address(node):
    return f"10.77.0.{node + 1}"


class Testbed:
    """`num_nodes` nodes, node0, node1, ...: `data` carries the messages of the ranks, `mgmt` those of mpirun itself."""

    def __init__(self, num_nodes):
        self.num_nodes = num_nodes
        Path("/run/netns").mkdir(exist_ok=True)
        Path("/run/tmp").mkdir(exist_ok=True)
        os.environ["TMPDIR"] = "/run/tmp"  # for mpirun's files
        for net in ("data", "mgmt"):
            ip("link", "add", f"{net}-switch", "type", "bridge")
            ip("link", "set", f"{net}-switch", "up", "mtu", "9000")
        for i in range(num_nodes):
            ip("netns", "add", f"node{i}")
            ip("-n", f"node{i}", "link", "set", "lo", "up")
            for number, net in enumerate(("data", "mgmt")):
                ip("link", "add", f"{net}{i}", "mtu", "9000", "type", "veth",
                   "peer", "name", net, "netns", f"node{i}", "mtu", "9000")
                ip("link", "set", f"{net}{i}", "master", f"{net}-switch", "up")
                ip("-n", f"node{i}", "addr", "add", f"10.77.{number}.{i + 1}/24", "dev", net)
                ip("-n", f"node{i}", "link", "set", net, "up")

    def start(self, ranks_per_node, command, environment=None, job=MpiJob):
        return job(ranks_per_node, command, environment or {})

    def sent_bytes(self, node):
        """Bytes that the node has sent over its data link."""
        link = json.loads(ip("-n", f"node{node}", "-s", "-j", "link", "show", "data"))[0]
        return link["stats64"]["tx"]["bytes"]

    def cut(self, node):
        ip("link", "set", f"data{node}", "down")

    def mend(self, node):
        """Undoes `cut`, also for what the nodes know of each other: that a node was out of reach is remembered for a while."""
        ip("link", "set", f"data{node}", "up")
        deadline = time.monotonic() + 30
        while json.loads(ip("-j", "link", "show", f"data{node}"))[0]["operstate"] != "UP" and time.monotonic() < deadline:
            time.sleep(0.02)
        for i in range(self.num_nodes):
            ip("-n", f"node{i}", "neigh", "flush", "dev", "data")

    def slow_down(self, node, rate):
        """Limits the rate of the link in both directions. Returns False if the kernel cannot."""
        limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
        there = ["tc", "qdisc", "replace", "dev", f"data{node}", *limit]
        back = ["tc", "-n", f"node{node}", "qdisc", "replace", "dev", "data", *limit]
        return all(subprocess.run(c, capture_output=True).returncode == 0 for c in (there, back))

    def held_back(self, node):
        """Number of outgoing packets that the limit of slow_down() delayed."""
        words = subprocess.run(["tc", "-n", f"node{node}", "-s", "qdisc", "show", "dev", "data"], check=True,
                               capture_output=True, text=True).stdout
        return int(re.search(r"overlimits (\d+)", words)[1])

    def full_speed(self, node):
        for command in (["tc", "qdisc", "del", "dev", f"data{node}", "root"],
                        ["tc", "-n", f"node{node}", "qdisc", "del", "dev", "data", "root"]):
            subprocess.run(command, capture_output=True)


def ranks_of_nodes(text):
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"must be the ranks of each node, such as 2,1,1, got {text}")
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", help="of every node's cable, such as 1gbit; default: what the machine does")
    parser.add_argument("--sockets", action="store_true", help="communicator sockets instead of MPI")
    parser.add_argument("ranks", type=ranks_of_nodes, metavar="RANKS,RANKS,...", help="of each node")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what they run, with its arguments")
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("COMMAND is missing: what the ranks run")
    enter_or_skip(() if arguments.sockets else MPI_TOOLS)
    bed = Testbed(len(arguments.ranks))
    if arguments.rate and not all(bed.slow_down(i, arguments.rate) for i in range(bed.num_nodes)):
        sys.exit(f"--rate {arguments.rate}: tc cannot do that here")
    started = bed.start(arguments.ranks, arguments.command, job=SocketsJob if arguments.sockets else MpiJob)
    result = started.wait()
    print(started.output, end="")
    print(started.errors, end="", file=sys.stderr)
    sys.exit(result)
