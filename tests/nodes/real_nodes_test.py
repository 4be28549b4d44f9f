#!/usr/bin/env python3
"""Crossdock on nodes that are network namespaces, with MPI over TCP between them.

    real_nodes_test.py <crossdock> <nodes_mpi_test> [unittest arguments]

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
DEADLINE_S = 6  # of the communicator, when a link is cut
STEPS = ("run_step", "route", "plan", "dispatch", "combine")

COMMAND, SUITE = sys.argv[1:3]

# Messages of several hundred KB between 2 nodes of 2 ranks.
LARGE = ["run", "--json", "--no-check", "--forward-only", "--tokens", "2048", "--width", "512", "--inner", "8",
         "--experts", "32", "--top-k", "8", "--strategy", "hierarchical"]


class RealNodes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.bed = testbed.Testbed(3)

    def tearDown(self):
        for node in range(self.bed.num_nodes):
            self.bed.mend(node)

    def run_job(self, ranks_per_node, command, environment=None):
        job = self.bed.start(ranks_per_node, command, environment)
        self.assertEqual(job.wait(LIMIT_S), 0, job.output + job.errors)
        self.expect_no_processes()
        return job

    def run_command(self, ranks_per_node, arguments):
        return json.loads(self.run_job(ranks_per_node, [COMMAND, *arguments]).output)

    def expect_no_processes(self):
        deadline = time.monotonic() + LIMIT_S
        while testbed.processes_here() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual(testbed.processes_here(), {})

    def sent_by_all(self):
        return sum(self.bed.sent_bytes(node) for node in range(self.bed.num_nodes))

    def test_the_suite_passes_on_two_nodes(self):
        self.run_job([2, 2], [SUITE, "--gtest_filter=-Conformance*"], {"CROSSDOCK_TEST_NODES": "2,2"})

    def test_the_suite_passes_on_three_nodes_of_different_size(self):
        self.run_job([2, 1, 1], [SUITE], {"CROSSDOCK_TEST_NODES": "2,1,1"})

    def test_every_strategy_gives_the_bits_of_threads(self):
        run = ["run", "--json", "--steps", "1", "--width", "24", "--inner", "16", "--experts", "10",
               "--top-k", "3", "--tokens-total", "203", "--strategy"]
        threads = json.loads(subprocess.run([COMMAND, *run, "alltoall", "--ranks", "1"], check=True,
                                            capture_output=True).stdout)
        for strategy in ("alltoall", "direct", "hierarchical"):
            result = self.run_command([1, 2, 1], [*run, strategy])
            self.assertEqual(result["nodes"], 3)
            self.assertEqual(result["check"]["passed"], True)
            self.assertEqual(result["checksum"], threads["checksum"], strategy)
            self.assertEqual(result["grad_checksum"], threads["grad_checksum"], strategy)

    def test_the_cables_carry_what_the_engine_counts(self):
        before = self.sent_by_all()
        traffic = self.run_command([2, 2], [*LARGE, "--steps", "2"])["traffic"]
        self.assertGreater(traffic["bytes_between_nodes"], 50e6)
        self.assertAlmostEqual((self.sent_by_all() - before) / traffic["bytes_between_nodes"], 1.0, delta=0.05)

    def test_one_node_leaves_the_cables_alone(self):
        before = self.sent_by_all()
        traffic = self.run_command([4], [*LARGE, "--steps", "2"])["traffic"]
        self.assertEqual(traffic["bytes_between_nodes"], 0)
        self.assertLess(self.sent_by_all() - before, 100e3)

    def test_65536_tokens_per_rank_need_no_deeper_window(self):
        result = self.run_command([2, 2], ["run", "--json", "--forward-only", "--steps", "1", "--tokens", "65536",
                                           "--width", "8", "--inner", "4", "--experts", "16", "--top-k", "8",
                                           "--strategy", "hierarchical", "--max-in-flight", "128",
                                           "--chunk-bytes", "16384"])
        self.assertEqual(result["check"]["passed"], True)
        self.assertLessEqual(result["max_in_flight_seen"], 128)
        self.assertGreater(result["traffic"]["requests_posted"], 10 * 128)

    def test_a_slow_link_holds_packets_back_and_changes_nothing_else(self):
        run = [*LARGE, "--steps", "2"]
        fast = self.run_command([2, 2], run)
        for node in (0, 1):
            self.addCleanup(self.bed.full_speed, node)
        if not all(self.bed.slow_down(node, "1gbit") for node in (0, 1)):
            self.skipTest("this kernel has no tbf")
        slow = self.run_command([2, 2], run)
        for node in (0, 1):
            self.assertGreater(self.bed.held_back(node), 0)
        for same in ("checksum", "load", "nodes", "strategy"):
            self.assertEqual(slow[same], fast[same])
        self.assertEqual(slow["traffic"]["bytes_between_nodes"], fast["traffic"]["bytes_between_nodes"])
        # Half of the bytes in each direction, all steps together; the counters include messages between steps.
        # No machine is faster than its link, so this holds however busy it is.
        least_s = 0.9 * slow["traffic"]["bytes_between_nodes"] / 2 / 125e6
        self.assertGreater(sum(slow["steps_us"]) * 1e-6, least_s)

    def test_a_cut_link_is_the_named_error_on_all_ranks(self):
        report = Path("/run/tmp/report.json")
        job = self.bed.start([2, 1, 1], [COMMAND, *LARGE, "--steps", "100000"],
                             {"CROSSDOCK_REPORT": report, "CROSSDOCK_PROGRESS_DEADLINE": DEADLINE_S,
                              "CROSSDOCK_ARRIVAL_DEADLINE": DEADLINE_S})
        before = self.bed.sent_bytes(2)
        give_up = time.monotonic() + LIMIT_S
        while self.bed.sent_bytes(2) < before + 50e6 and job.process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.01)
        self.bed.cut(2)
        status = job.wait(LIMIT_S)
        words = job.output + job.errors
        self.assertIsNotNone(status, words)  # it was not killed
        self.expect_no_processes()
        errors = {line["rank"]: line for line in map(json.loads, report.read_text().splitlines())}
        self.assertEqual(sorted(errors), [0, 1, 2, 3], words)
        for rank, line in errors.items():
            self.assertIn(line["operation"], STEPS, line["error"])
            self.assertGreater(line["sequence"], 0)
            self.assertIn(f"waited {DEADLINE_S} s for ", line["error"])
        for rank in (0, 1, 2):  # still connected to each other
            self.assertEqual(errors[rank]["culprit"], 3, errors[rank]["error"])
            self.assertEqual(errors[rank]["sequence"], errors[0]["sequence"])
        self.assertIn(errors[3]["culprit"], (0, 1, 2), errors[3]["error"])
        self.assertIn(errors[0]["error"], words)

    def test_a_link_that_is_down_from_the_beginning_is_the_named_error_too(self):
        self.bed.cut(1)
        job = self.bed.start([1, 1], [COMMAND, *LARGE, "--steps", "1"], {"CROSSDOCK_ARRIVAL_DEADLINE": DEADLINE_S})
        status = job.wait(LIMIT_S)
        self.assertIsNotNone(status, job.output + job.errors)  # it was not killed
        self.assertIn(f"waited {DEADLINE_S} s for all processes", job.output + job.errors)
        self.expect_no_processes()

    def test_nothing_is_left_when_it_is_killed(self):
        links = testbed.ip("link")
        environment = {name: value for name, value in os.environ.items() if name != testbed.INSIDE}
        for how in (signal.SIGKILL, signal.SIGTERM):
            bed = subprocess.Popen([sys.executable, testbed.__file__, "1,1", COMMAND, *LARGE, "--steps", "100000"],
                                   env=environment)
            deadline = time.monotonic() + LIMIT_S
            while len([c for c in testbed.processes_here().values() if c.startswith(COMMAND)]) < 2:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.05)
            bed.send_signal(how)
            bed.wait()
            self.expect_no_processes()
            self.assertEqual(testbed.ip("link"), links)


if __name__ == "__main__":
    testbed.enter_or_skip()
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
