"""What was measured, as lines to read."""

from typing import Any

COLUMNS = f"{'':24}{'median':>12}{'a second':>16}{'x ours':>9}   smallest-largest"


def heading(machine: dict[str, Any], versions: dict[str, str]) -> str:
    """Where and with what it was measured."""
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}"
    inherited = [f"{name}={value}" for name, value in machine["environment"].items()]
    return "\n".join([where, software, *inherited])


def workload(name: str, result: dict[str, Any], *, dtype: str = "float32") -> str:
    """The table of one workload, ours first."""
    lines = [f"{name}: {result['title']}; {result['ours']['parameters']:,} parameters, {dtype}", COLUMNS]
    reports = {"ours": result["ours"], **result["peers"]}
    lines += [row(who, report, result["unit"]) for who, report in reports.items()]
    lines += [f"  {peer} is missing: {reason}" for peer, reason in result["missing"].items()]
    if result["awake_share"] > 0.05:
        lines += [
            f"  participants that were to sleep took {result['awake_share']:.0%} of a core: not a quiet measurement"
        ]
    return "\n".join(lines)


def row(name: str, report: dict[str, Any], unit: str) -> str:
    """One participant: its time, its rate, and how many times as long as ours it takes."""
    rate = (
        f"{report['per_second']:,.0f} {unit}"
        if report["per_second"] < 1e8
        else f"{report['per_second'] / 1e9:,.1f} G{unit}"
    )
    line = f"  {name:22}{duration(report['median_seconds']):>12}{rate:>16}"
    if "ratio" not in report:
        return f"{line}  ({report['threads']} threads)"
    low, high = report["ratio_spread"]
    return f"{line}{report['ratio']:>9.2f}   {low:.2f}-{high:.2f}"


def overview(results: dict[str, dict[str, Any]]) -> str:
    """The last word: each workload's ratio to its fastest peer, what that could be at most on this machine, about
    (limit.py), and our share of the rate of a large product."""
    lines = []
    for name, result in results.items():
        if "ratio" not in result:
            continue
        low, high = result["ratio_spread"]
        share = result["ours"].get("share_of_product_rate")
        of_rate = "" if share is None else f", {share:.0%} of the product rate"
        most = f"{result['ratio_at_most']:.2f}" if "ratio_at_most" in result else "?"
        against = f"{result['fastest_peer']} ({low:.2f}-{high:.2f})"
        lines.append(f"{name:14}{result['ratio']:>8.2f}{most:>9}   {against}{of_rate}")
    return "\n".join([f"{'':14}{'x ours':>8}{'at most':>9}   fastest peer", *lines]) if lines else ""


def duration(seconds: float) -> str:
    """12.3 ms, 4.56 s."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
