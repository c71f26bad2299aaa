"""What was measured, as lines and as a figure; where; and what a program can hardly go below on that machine."""

import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import matplotlib.figure
import matplotlib.patches

from benchmarks import sizes

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "transformers")
# What all participants inherit, and what can change a time.
ENVIRONMENT = ("GLIBC_TUNABLES", "LD_PRELOAD", "XLA_FLAGS", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS")
COLUMNS = f"{'':24}{'median':>12}{'a second':>16}{'x ours':>9}   smallest-largest"
COLOURS = {"ours": "#1b6ca8", "transformers": "#d9822b", "transformers compiled": "#e8b877", "flax": "#7a9e7e"}
WIDTH = 0.2  # of a bar, where the groups are 1 apart
HIGHEST = 8.0  # of what is drawn: a bar that would be higher is cut there, and its number tells


def machine() -> dict[str, Any]:
    """Processor (its name, with numbers, since all EPYC are "EPYC", and its widest vectors), cores, memory, system."""
    processor = platform.processor() or platform.machine()
    if (cpuinfo := pathlib.Path("/proc/cpuinfo")).exists():
        fields = dict(map(str.strip, line.split(":", 1)) for line in cpuinfo.read_text().splitlines() if ":" in line)
        numbers = [f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields]
        vectors = (("avx512f", "AVX-512"), ("avx2", "AVX2"))
        wide = [name for flag, name in vectors if flag in fields.get("flags", "").split()]
        processor = ", ".join([fields.get("model name", platform.machine()), *numbers, *wide[:1]])
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def versions() -> dict[str, str]:
    installed = {str(one.name).lower() for one in importlib.metadata.distributions()}
    libraries = {name: importlib.metadata.version(name) for name in LIBRARIES if name in installed}
    return {"python": platform.python_version(), **libraries}


def heading(machine: dict[str, Any], versions: dict[str, str]) -> str:
    """Where and with what it was measured."""
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}"
    return "\n".join([where, software, *(f"{name}={value}" for name, value in machine["environment"].items())])


def workload(name: str, result: dict[str, Any], *, dtype: str = "float32") -> str:
    """The table of one workload, ours first: times, rates, and how many times as long as ours each takes."""
    lines = [f"{name}: {result['title']}; {result['ours']['parameters']:,} parameters, {dtype}", COLUMNS]
    for who, one in {"ours": result["ours"], **result["peers"]}.items():
        many, unit = one["per_second"], result["unit"]
        rate = f"{many:,.0f} {unit}" if many < 1e8 else f"{many / 1e9:,.1f} G{unit}"
        line = f"  {who:22}{duration(one['median_seconds']):>12}{rate:>16}"
        if "ratio" in one:
            lines.append("{}{:>9.2f}   {:.2f}-{:.2f}".format(line, one["ratio"], *one["ratio_spread"]))
        else:
            lines.append(f"{line}  ({one['threads']} threads)")
    lines += [f"  {peer} is missing: {reason}" for peer, reason in result["missing"].items()]
    return "\n".join(lines)


def overview(results: dict[str, dict[str, Any]]) -> str:
    """The last word: each workload's ratio to its fastest peer, what that could be at most on this machine, about
    (`add_limits`), and our share of the rate of a large product."""
    lines = []
    for name, result in results.items():
        if "ratio" in result:
            share = result["ours"].get("share_of_product_rate")
            of_rate = "" if share is None else f", {share:.0%} of the product rate"
            most = f"{result['ratio_at_most']:.2f}" if "ratio_at_most" in result else "?"
            against = "{} ({:.2f}-{:.2f})".format(result["fastest_peer"], *result["ratio_spread"])
            lines.append(f"{name:14}{result['ratio']:>8.2f}{most:>9}   {against}{of_rate}")
    return "\n".join([f"{'':14}{'x ours':>8}{'at most':>9}   fastest peer", *lines]) if lines else ""


def duration(seconds: float) -> str:
    """12.3 ms, 4.56 s."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def add_limits(report: dict[str, Any], workloads: Mapping[str, sizes.Workload]) -> None:
    """Into each workload that stands beside the machine's rates: our share of the product rate (training steps), and
    about the largest ratio to the fastest peer that there could be: a step's products at the rate of large ones, and
    reading at that of the memory. Rates and times are medians of one session, in which the machine's speed varies."""
    rates = {
        name: max(one["per_second"] for one in (report[name]["ours"], *report[name]["peers"].values()))
        for name in ("product", "read", "gpu_product")
        if name in report
    }
    for name in report.keys() & workloads.keys():
        result, size = report[name], workloads[name]
        product = rates.get("gpu_product" if size.platform == "gpu" else "product")
        if product is None:
            continue
        if size.kind in ("words", "images"):
            least = result["ours"]["step_flops"] / product
            result["ours"]["share_of_product_rate"] = least / result["ours"]["median_seconds"]
        elif size.kind == "generation" and "read" in rates:
            least = generation(size, product=product, read=rates["read"])
        else:
            continue
        if "fastest_peer" in result:
            result["ratio_at_most"] = result["peers"][result["fastest_peer"]]["median_seconds"] / least


def generation(size: sizes.Workload, *, product: float, read: float) -> float:
    """Seconds: of the products, or of the numbers read, whichever take longer. product: FLOP/s. read: bytes/s."""
    matrices = 12 * size.M * size.D**2 + size.W * size.D  # four of D x D and two of D x 4D of a layer; unembedding
    kept = 2 * size.M * size.B * size.D * (size.new + 1) / 2  # keys and values looked at for a word, in the mean
    return max(2 * size.B * size.new * matrices / product, 4 * size.new * (matrices + kept) / read)


def draw(file: pathlib.Path, results: dict[str, dict[str, Any]], *, machine: dict[str, Any]) -> None:
    """Write the PNG: times relative to ours, which are 1; the medians of the turns, with their spread.

    results: of workloads, by their names, as `session.measure` returns them.
    """
    canvas = matplotlib.figure.Figure(figsize=(max(1.7 * len(results) + 1, 6), 4.2), dpi=150, layout="constrained")
    axes = canvas.subplots()
    names = ["ours", *dict.fromkeys(peer for result in results.values() for peer in result["peers"])]
    for group, result in enumerate(results.values()):
        bars(axes, group, result)
    axes.axhline(1, color=COLOURS["ours"], linewidth=0.8, zorder=0)
    axes.set_xlim(-0.6, len(results) - 0.4)
    axes.set_ylim(0, 1.08 * min(HIGHEST, axes.get_ylim()[1]))
    feet = [
        f"{name}\n{result['title']}\nours: {duration(result['ours']['median_seconds'])}"
        for name, result in results.items()
    ]
    axes.set_xticks(range(len(results)), feet, fontsize=8)
    axes.set_ylabel("time, relative to ours (less is faster)")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [matplotlib.patches.Patch(color=COLOURS.get(name, "grey"), label=name) for name in names]
    canvas.legend(handles=handles, frameon=False, fontsize=8, ncols=len(names), loc="outside upper center")
    axes.set_xlabel(f"{machine['processor']}, {machine['cores']} cores, float32", fontsize=8, color="0.4")
    canvas.savefig(file)


def bars(axes: Any, group: int, result: dict[str, Any]) -> None:
    """The bars of one workload, side by side around its place."""
    ones = {"ours": {"ratio": 1.0, "ratio_spread": (1.0, 1.0)}, **result["peers"]}
    for i, (name, one) in enumerate(ones.items()):
        x, ratio = group + (i - (len(ones) - 1) / 2) * WIDTH, one["ratio"]
        low, top, high = (min(y, HIGHEST) for y in (one["ratio_spread"][0], ratio, one["ratio_spread"][1]))
        spread = {"yerr": [[top - low], [high - top]], "error_kw": {"ecolor": "0.3", "elinewidth": 0.8}}
        axes.bar(x, top, WIDTH * 0.92, color=COLOURS.get(name, "grey"), **spread)
        if name != "ours":
            told = f"{ratio:.2f}" if ratio <= HIGHEST else f"↑ {ratio:.1f}"
            axes.annotate(told, (x, high), (0, 2), textcoords="offset points", ha="center", fontsize=7)
