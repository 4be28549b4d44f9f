#!/usr/bin/env python3
"""Makes tables and plots from the raw files of tools/bench_run.py.

    tools/bench_page.py            # writes them
    tools/bench_page.py --check    # fails if one of them does not match the raw files

bench/results/NAME.json -> bench/results/NAME.md    every figure
                        -> docs/plots/NAME.svg      the plot of the page
                        -> docs/benchmarks.md       the small table between <!-- NAME --> and <!-- end of NAME -->
"""
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
# The fastest public code that we have measured for h200-deepseek, as multiples of the floor: torchtitan's MinimalAsyncEP and
# HybridEP, as of August 2026, unchanged, 8 ranks on one H200. Measured once; what ran them is not part of this repository.
PUBLIC = {"plan+dispatch": ("MinimalAsyncEP", 2.4), "combine": ("HybridEP", 2.3)}
# Ratios that must be reached on an H200; for decode, microseconds.
LARGE = {"dispatch": 1.15, "plan+dispatch": 1.30, "combine": 1.08, "dispatch_backward": 1.10, "combine_backward": 1.20}
SMALL = {"dispatch": 1.3, "plan+dispatch": 1.6, "combine": 1.15, "dispatch_backward": 1.2, "combine_backward": 1.3}
GOALS = {"h200-deepseek": LARGE, "h200-qwen3": LARGE, "h200-gptoss": SMALL}
GOALS_US = {("h200-decode", "plan+disp.+combine"): 120}


def entries_of(results):
    return [entry for run in results["runs"] for entry in run["entries"]]


def find(results, scenario, strategy, communicator):
    for entry in entries_of(results):
        if (entry["scenario"], entry["strategy"], entry["communicator"]) == (scenario, strategy, communicator):
            return entry
    return None


def sizes(entry):
    text = "P{ranks} T{tokens} D{width} K{top_k} E{experts} {dtype}".format(**entry)
    return text + (f", {entry['max_sms']} SMs per rank" if "max_sms" in entry else "")


def ms(us):
    return f"{us / 1000:.3g}" if us < 100e3 else f"{us / 1000:.0f}"


def us_text(us):
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def table(head, rows):
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *("| " + " | ".join(row) + " |" for row in rows)]


def cpu_rows(entries):
    for entry in entries:
        for name, step in entry["steps"].items():
            plain = entry["steps"].get(name + "_blas")
            traffic = [ms(step["traffic_us"]), f"{step['traffic_ratio']:.2f}"] if "traffic_us" in step else ["", ""]
            note = f"{step['gflops']:.0f} GFLOP/s" if "gflops" in step else ""
            if plain:
                note += f", {plain['median_us'] / step['median_us']:.0%} of BLAS"
            yield [entry["strategy"], entry["communicator"], name, ms(step["median_us"]),
                   f"{ms(step['min_us'])} to {ms(step['max_us'])}", ms(step["copy_us"]), f"{step['ratio']:.2f}",
                   *traffic, note]


def cpu_raw(results):
    head = ["strategy", "communicator", "step", "median ms", "min to max", "copy ms", "ratio", "traffic ms", "ratio", ""]
    lines = []
    for run in results["runs"]:
        lines += [f"`{run['command']}` (load before it: {run['load']})", ""]
        for name in dict.fromkeys(entry["scenario"] for entry in run["entries"]):
            entries = [entry for entry in run["entries"] if entry["scenario"] == name]
            lines += [f"**{name}**: {sizes(entries[0])}", "", *table(head, cpu_rows(entries)), ""]
    return lines


def goal(scenario, name):
    if (scenario, name) in GOALS_US:
        return f"{GOALS_US[scenario, name]} µs"
    ratio = GOALS.get(scenario, {}).get(name)
    return "" if ratio is None else f"{ratio:.2f}"


def gpu_raw(results):
    head = ["scenario", "step", "MB", "median µs", "min", "max", "floor µs", "ratio", "at most"]
    rows = []
    lines = [line for run in results["runs"] for line in (f"`{run['command']}`", "")]
    for entry in entries_of(results):
        step = entry["steps"]["dispatch"]
        lines.append(f"- `{entry['scenario']}`: {sizes(entry)}; copies at {step['bytes'] / step['copy_us'] / 1e6:.2f} TB/s; "
                     f"results {'checked' if entry['checked'] else 'NOT checked'}")
        for name, step in entry["steps"].items():
            floor = ["", ""] if name in ("nothing", "plan") else [us_text(step["copy_us"]), f"{step['ratio']:.2f}"]
            times = [us_text(step[key]) for key in ("median_us", "min_us", "max_us")]
            rows.append([entry["scenario"], name, f"{step['bytes'] / 1e6:.1f}", *times, *floor, goal(entry["scenario"], name)])
    return [*lines, "", *table(head, rows), ""]


def time_and_ratio(step, text):
    return f"{text(step['median_us'])} ({step['ratio']:.2f})"


def cpu_small(results):
    """direct compared with straightforward code, each with its ratio to a copy in the same run."""
    rows = []
    for scenario in ("cpu-large", "cpu-medium", "cpu-many-ranks", "decode"):
        for strategy, communicator in (("direct", "threads"), ("direct", "mpi"), ("anchor-mpi-pack", "mpi")):
            entry = find(results, scenario, strategy, communicator)
            steps = [time_and_ratio(entry["steps"][name], ms) for name in ("dispatch", "combine")]
            first = f"`{scenario}`: {sizes(entry)}" if (strategy, communicator) == ("direct", "threads") else ""
            rows.append([first, f"`{strategy}`", communicator, *steps])
    return table(["scenario", "strategy", "ranks are", "dispatch, ms (× copy)", "combine, ms (× copy)"], rows)


def gpu_small(results):
    names = ("dispatch", "plan+dispatch", "combine", "dispatch_backward", "combine_backward")
    rows = [[f"`{entry['scenario']}`: {sizes(entry)}", *(time_and_ratio(entry["steps"][name], us_text) for name in names)]
            for entry in entries_of(results)]
    return table(["scenario, µs (× floor)", *(f"`{name}`" for name in names)], rows)


STYLE = ("text{font:13px sans-serif;fill:#222}.s{font-size:11px}.t{font-weight:bold}.m,.p{fill:#b03a2e}.b{fill:#fff}line{stroke:#222}"
         "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}.m,.p{fill:#ff8a7a}.b{fill:#0d1117}line{stroke:#d1d7e0}}")


def svg(title, axis, groups, *, limit, markers=()):
    """Horizontal bars. groups: (label, [(name, value, color)]); markers: (group, name, text, value) as a tick with its text."""
    left, right, bar, gap, top = 190, 60, 15, 12, 56
    width, scale = 760, (760 - 190 - 60) / limit
    parts, y, place = [], top, {}
    for label, bars in groups:
        middle = y + len(bars) * bar / 2 + 4
        parts.append(f'<text x="{left - 10}" y="{middle:.0f}" text-anchor="end">{label}</text>')
        for name, value, color in bars:
            end = left + min(value, limit) * scale
            parts.append(f'<rect x="{left}" y="{y + 1}" width="{end - left:.1f}" height="{bar - 2}" fill="{color}"/>')
            parts.append(f'<text x="{end + 4:.1f}" y="{y + bar - 4}" class="s">{value:.2f}</text>')
            place[label, name] = y
            y += bar
        y += gap
    for label, name, text, value in markers:
        x, at = left + value * scale, place[label, name]
        parts.append(f'<rect x="{x - 1:.1f}" y="{at - 1}" width="3" height="{bar + 2}" class="p"/>')
        parts.append(f'<text x="{x + 6:.1f}" y="{at + bar - 4}" class="s m">{text} {value:.1f}</text>')
    one, height = left + scale, y + 14
    legend, x = [], left
    for name, color in dict.fromkeys((name, color) for _, bars in groups for name, _, color in bars):
        legend.append(f'<rect x="{x:.0f}" y="34" width="10" height="10" fill="{color}"/><text x="{x + 14:.0f}" y="43" class="s">{name}</text>')
        x += 26 + 6.6 * len(name)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>", f'<rect width="{width}" height="{height}" class="b"/>', f'<text x="12" y="20" class="t">{title}</text>', *legend, *parts,
        f'<line x1="{one:.1f}" y1="{top - 6}" x2="{one:.1f}" y2="{y - 4}" stroke-dasharray="4 3"/>',
        f'<text x="{one:.1f}" y="{y + 8}" class="s" text-anchor="middle">1 = {axis}</text>', "</svg>", ""])


COLORS = {"dispatch": "#2e6f9e", "plan+dispatch": "#7fb0d3", "combine": "#d98b2b", "dispatch_backward": "#8a8f3c",
          "combine_backward": "#b9a44c"}


def bars_of(entry, names):
    return [(name, entry["steps"][name]["ratio"], COLORS[name]) for name in names]


def cpu_plot(results):
    groups = []
    for strategy in ("direct", "hierarchical", "alltoall", "allgather", "anchor-mpi-pack"):
        for communicator in ("threads", "mpi"):
            if entry := find(results, "cpu-large", strategy, communicator):
                groups.append((f"{strategy}, {communicator}", bars_of(entry, ("dispatch", "combine"))))
    size = sizes(find(results, "cpu-large", "direct", "threads"))
    return svg(f"cpu-large ({size}): time over the time of a plain copy", "memcpy of as many bytes", groups, limit=8)


def gpu_plot(results):
    groups = [(entry["scenario"], bars_of(entry, COLORS)) for entry in entries_of(results)]
    markers = [("h200-deepseek", name, *public) for name, public in PUBLIC.items()]
    return svg("One H200, all ranks on it: time over the memory floor", "the bytes at the speed of a device-to-device copy",
               groups, limit=3, markers=markers)


MAKERS = {"cpu": (cpu_raw, cpu_small, cpu_plot), "h200": (gpu_raw, gpu_small, gpu_plot)}


def render():
    """Yields (path, text) of every file that is made from the raw files."""
    page = PAGE.read_text()
    for name, (raw, small, plot) in MAKERS.items():
        results = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
        where = f"{results['date']}, {results['machine']}."
        yield ROOT / "bench" / "results" / f"{name}.md", "\n".join(
            [f"# Results: {name}", "", f"{where} Made by `tools/bench_page.py` from `{name}.json`.", "", *raw(results)])
        yield ROOT / "docs" / "plots" / f"{name}.svg", plot(results)
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, rest = page.split(begin)
        page = before + begin + "\n" + "\n".join([where, "", *small(results), ""]) + "\n" + rest[rest.index(end):]
    yield PAGE, page


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(__doc__)
    stale = [path for path, text in list(render()) if not path.exists() or path.read_text() != text]
    if check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what bench/results/*.json say: run tools/bench_page.py")
        sys.exit(bool(stale))
    for path, text in list(render()):
        path.write_text(text)


if __name__ == "__main__":
    main()
