#!/usr/bin/env python3
"""Builds the Debian packages, installs them in a new Debian (debootstrap), and uses them there.

Usage: deb_test.py SOURCE_DIR

The command runs, its man pages and completions are there, and tests/install/consumer is built with find_package and with
pkg-config. A removed package leaves nothing behind. Exit status 77, with the reason, without CROSSDOCK_TEST_DEB=1,
and if this machine cannot make a new Debian: that needs root, debootstrap and a mirror of Debian.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

MIRROR = "http://deb.debian.org/debian"
RELEASE = "bookworm"
TOOLS = "g++,cmake,make,pkg-config"
DEADLINE = 900  # seconds for one command
WITHOUT_PAGE = ("help", "version", "completion", "man")
COMPLETIONS = (
    "bash-completion/completions/crossdock", "zsh/site-functions/_crossdock", "fish/vendor_completions.d/crossdock.fish",
)


def run(*command, **options):
    print("deb_test:", *command, flush=True)
    return subprocess.run([str(word) for word in command], check=True, timeout=DEADLINE, **options)


def skip(reason):
    print(f"deb_test: skipped: {reason}")
    sys.exit(77)


def check_machine():
    if os.environ.get("CROSSDOCK_TEST_DEB") != "1":
        skip("it takes up to an hour and downloads a Debian: run make test-deb, which sets CROSSDOCK_TEST_DEB=1")
    if os.geteuid() != 0:
        skip("debootstrap needs root")
    for tool in ("debootstrap", "dpkg-shlibdeps"):
        if not shutil.which(tool):
            skip(f"{tool} is not on this machine: run tools/setup.sh packages")


def build_packages(source):
    run("cmake", "--preset", "deb", cwd=source)
    run("cmake", "--build", "--preset", "deb", "--parallel", "2", cwd=source)
    for old in (source / "build/deb").glob("*.deb"):
        old.unlink()
    run("cpack", "-G", "DEB", cwd=source / "build/deb")
    return sorted((source / "build/deb").glob("*.deb"))


def make_debian(root):
    made = subprocess.run(["debootstrap", "--variant=minbase", f"--include={TOOLS}", RELEASE, root, MIRROR],
                          capture_output=True, text=True, timeout=DEADLINE, check=False)
    if made.returncode != 0:
        text = made.stdout + made.stderr
        if "Failed getting release file" in text or "Couldn't download" in text:
            skip(f"{MIRROR} cannot be reached")
        if "noexec or nodev" in text or "mount" in text.splitlines()[-1]:
            skip(text.splitlines()[-1])
        sys.exit(text)


def check_texts(share, inside):
    """Man pages and completions are installed, where man and the shells look, and are not empty."""
    helped = inside("crossdock", "--help", capture_output=True, text=True).stdout
    commands = re.findall(r"^  (\w+) ", helped.split("Commands:")[1].split("\n\n")[0], re.MULTILINE)
    assert "run" in commands, helped
    pages = ["crossdock.1", *(f"crossdock-{command}.1" for command in commands if command not in WITHOUT_PAGE)]
    for file in [*(f"man/man1/{page}" for page in pages), *COMPLETIONS]:
        found = [path for path in (share / file, share / f"{file}.gz") if path.exists() and path.stat().st_size > 0]
        assert found, f"{share / file} is missing or empty"


def use_packages(root, packages, consumer):
    def inside(*command, **options):
        mounted = 'mount --bind /proc "$0/proc" && exec chroot "$0" "$@"'  # for this command only
        return run("unshare", "--mount", "sh", "-c", mounted, root, "env", "DEBIAN_FRONTEND=noninteractive", "HOME=/root",
                   *command, **options)

    for package in packages:
        shutil.copy(package, root / "root")
    shutil.copytree(consumer, root / "root/consumer")
    main = [f"/root/{package.name}" for package in packages if "openmpi" not in package.name]
    plugin = [f"/root/{package.name}" for package in packages if "openmpi" in package.name]

    inside("apt-get", "install", "-y", "-q", "--no-install-recommends", *main)
    inside("crossdock", "info")
    inside("crossdock", "run", "--preset", "qwen3-30b-a3b", "--ranks", "2", "--tokens", "64", "--scale", "32")
    check_texts(root / "usr/share", inside)
    inside("cmake", "-S", "/root/consumer", "-B", "/root/by_cmake")
    inside("cmake", "--build", "/root/by_cmake")
    inside("/root/by_cmake/consumer")
    inside("/root/by_cmake/judge")
    inside("sh", "-c", "g++ -std=c++20 /root/consumer/main.cpp -o /root/by_pkg_config $(pkg-config --cflags --libs crossdock)")
    inside("/root/by_pkg_config")

    if plugin:  # it brings MPI, which the other package must not need
        assert not list((root / "usr/lib").rglob("libmpi.so*")), "crossdock depends on MPI"
        inside("apt-get", "install", "-y", "-q", "--no-install-recommends", *plugin, "openmpi-bin")
        inside("env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "mpirun", "--oversubscribe", "-n", "2",
               "crossdock", "run", "--preset", "qwen3-30b-a3b", "--tokens", "64", "--scale", "32")

    inside("apt-get", "remove", "-y", "-q", "crossdock")
    left = [path for path in (root / "usr").rglob("*crossdock*") if path.is_file()]
    assert not left, f"apt-get remove left {left}"


def main():
    source = pathlib.Path(sys.argv[1]).resolve()
    check_machine()
    with tempfile.TemporaryDirectory(prefix="crossdock_deb_") as folder:
        root = pathlib.Path(folder) / "root"
        make_debian(root)
        use_packages(root, build_packages(source), source / "tests/install/consumer")
    print("deb_test: ok")


if __name__ == "__main__":
    main()
