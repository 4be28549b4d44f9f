#!/usr/bin/env python3
"""Communicator sockets on nodes that are network namespaces, with separate process namespaces and TCP between them.

    real_nodes_sockets_test.py <crossdock> [unittest arguments]

Exits with status 77, which ctest reports as skipped, if namespaces cannot be made.
"""

import json
import os
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

import testbed

LIMIT_S = 900  # for a job that hangs; many times what a job needs on a busy machine
DEADLINE_S = 300  # of the communicator, when a failure must be detected before it expires
SHORT_DEADLINE_S = 6  # of the communicator, when a link is cut
NOTICE_S = 120  # to detect a death, report it and exit, on a busy machine

COMMAND = sys.argv[1]

SMALL = ["run", "--json", "--steps", "1", "--width", "24", "--inner", "16", "--experts", "10", "--top-k", "3",
         "--tokens-total", "203"]
# Messages of several hundred KB between 2 nodes of 2 ranks.
LARGE = ["run", "--json", "--no-check", "--forward-only", "--tokens", "2048", "--width", "512", "--inner", "8",
         "--experts", "32", "--top-k", "8", "--strategy", "hierarchical"]


class RealNodes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.bed = testbed.Testbed(3)

    def setUp(self):
        self.report = Path("/run/tmp/report.json")
        self.report.unlink(missing_ok=True)

    def tearDown(self):
        for node in range(self.bed.num_nodes):
            self.bed.mend(node)

    def start(self, ranks_per_node, arguments, environment=None):
        return self.bed.start(ranks_per_node, [COMMAND, *arguments], environment, testbed.SocketsJob)

    def run_command(self, ranks_per_node, arguments):
        job = self.start(ranks_per_node, arguments)
        self.assertEqual(job.wait(LIMIT_S), 0, job.output + job.errors)
        self.expect_no_processes()
        return json.loads(job.output)

    def expect_no_processes(self):
        deadline = time.monotonic() + LIMIT_S
        while testbed.processes_here() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual(testbed.processes_here(), {})

    def wait_until(self, condition, job):
        deadline = time.monotonic() + LIMIT_S
        while not condition() and all(node.poll() is None for node in job.nodes) and time.monotonic() < deadline:
            time.sleep(0.01)

    def start_large(self, environment):
        """A long job on three nodes that has begun to move rows."""
        before = self.bed.sent_bytes(2)
        job = self.start([2, 1, 1], [*LARGE, "--steps", "100000"], {"CROSSDOCK_REPORT": self.report, **environment})
        self.wait_until(lambda: self.bed.sent_bytes(2) > before + 50e6, job)
        if any(node.poll() is not None for node in job.nodes):
            self.fail(f"the job has ended with status {job.wait(LIMIT_S)}: {job.output}{job.errors}")
        return job

    def reported(self):
        """The first line of each rank in the flight report."""
        lines = {}
        for line in map(json.loads, self.report.read_text().splitlines()):
            lines.setdefault(line["rank"], line)
        return lines

    def test_every_strategy_gives_the_bits_of_threads(self):
        threads = json.loads(subprocess.run([COMMAND, *SMALL, "--strategy", "alltoall", "--ranks", "1"], check=True,
                                            capture_output=True).stdout)
        for strategy in ("allgather", "alltoall", "direct", "hierarchical"):
            result = self.run_command([1, 2, 1], [*SMALL, "--strategy", strategy])
            self.assertEqual(result["communicator"], "sockets")
            self.assertEqual(result["nodes"], 3)
            self.assertEqual(result["check"]["passed"], True)
            self.assertEqual(result["checksum"], threads["checksum"], strategy)
            self.assertEqual(result["grad_checksum"], threads["grad_checksum"], strategy)

    def test_ranks_on_one_machine_that_cannot_share_memory_say_so(self):
        result = self.run_command([1, 1], SMALL)
        self.assertEqual(result["note"], "tcp on one machine: rank 0 cannot share memory with rank 1 "
                                         "(it runs in another container)")

    def test_the_cables_carry_what_the_communicator_counts(self):
        sent = [self.bed.sent_bytes(node) for node in (0, 1)]
        traffic = self.run_command([2, 2], [*LARGE, "--steps", "2"])["traffic"]
        carried = sum(self.bed.sent_bytes(node) for node in (0, 1)) - sum(sent)
        self.assertGreater(traffic["bytes_between_nodes"], 50e6)
        self.assertAlmostEqual(carried / traffic["bytes_between_nodes"], 1.0, delta=0.05)

    def test_one_node_leaves_the_cables_alone(self):
        before = self.bed.sent_bytes(0)
        self.assertEqual(self.run_command([4], [*LARGE, "--steps", "2"])["traffic"]["bytes_between_nodes"], 0)
        self.assertLess(self.bed.sent_bytes(0) - before, 100e3)

    def test_a_rank_killed_on_another_node_is_named_by_all_survivors(self):
        job = self.start_large({"CROSSDOCK_PROGRESS_DEADLINE": DEADLINE_S, "CROSSDOCK_ARRIVAL_DEADLINE": DEADLINE_S})
        victim = job.process_of(3)
        self.assertIsNotNone(victim)
        os.kill(victim, signal.SIGKILL)
        status = job.wait(NOTICE_S)
        words = job.output + job.errors
        self.assertIsNotNone(status, words)  # it ended by itself, long before a deadline
        self.expect_no_processes()
        lines = self.reported()
        for rank in (0, 1, 2):
            self.assertEqual(lines[rank]["culprit"], 3, lines[rank]["error"])
            self.assertEqual(lines[rank]["sequence"], lines[0]["sequence"])
            self.assertIn("rank 3 left the group (its connection", lines[rank]["error"])

    def test_a_cut_link_is_the_named_error_on_all_ranks(self):
        job = self.start_large({"CROSSDOCK_PROGRESS_DEADLINE": SHORT_DEADLINE_S,
                                "CROSSDOCK_ARRIVAL_DEADLINE": SHORT_DEADLINE_S})
        self.bed.cut(2)
        status = job.wait(LIMIT_S)
        words = job.output + job.errors
        self.assertIsNotNone(status, words)  # it was not killed
        self.expect_no_processes()
        lines = self.reported()
        self.assertEqual(sorted(lines), [0, 1, 2, 3], words)
        for rank in (0, 1, 2):  # still connected to each other
            self.assertEqual(lines[rank]["culprit"], 3, lines[rank]["error"])
        self.assertIn(lines[3]["culprit"], (0, 1, 2), lines[3]["error"])

    def test_a_process_that_never_comes_is_named_by_the_store(self):
        self.bed.cut(1)
        job = self.start([1, 1], SMALL, {"CROSSDOCK_ARRIVAL_DEADLINE": SHORT_DEADLINE_S})
        status = job.wait(LIMIT_S)
        words = job.output + job.errors
        self.assertIsNotNone(status, words)  # it was not killed
        self.assertIn(f"waited {SHORT_DEADLINE_S} s for rank 1 to start", " ".join(words.split()))
        self.expect_no_processes()


if __name__ == "__main__":
    testbed.enter_or_skip(tools=())
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)
