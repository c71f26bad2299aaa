"""What a program can hardly go below on a machine: a step's products at the rate of large ones, reading at that of the
memory. With the fastest peer's time this is about how many times faster than it anything could be.

Rates and times are medians of one session: where a machine's speed varies, so does this.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks import sizes


def add(report: dict[str, Any], workloads: Mapping[str, sizes.Workload]) -> None:
    """Into each workload that stands beside the machine's rates: our share of the product rate (training steps), and
    about the largest ratio to the fastest peer that there could be."""
    rates = {name: rate(report[name]) for name in ("product", "read", "gpu_product") if name in report}
    for name, result in report.items():
        size = workloads.get(name)
        product = rates.get("gpu_product" if size and size.platform == "gpu" else "product")
        if size is None or product is None or size.kind not in ("words", "images", "generation"):
            continue
        if size.kind != "generation":
            least = result["ours"]["step_flops"] / product
            result["ours"]["share_of_product_rate"] = least / result["ours"]["median_seconds"]
        elif "read" in rates:
            least = generation(size, product=product, read=rates["read"])
        else:
            continue
        if "fastest_peer" in result:
            result["ratio_at_most"] = result["peers"][result["fastest_peer"]]["median_seconds"] / least


def rate(result: dict[str, Any]) -> float:
    """The fastest participant's, a second: FLOP or bytes."""
    return max(one["per_second"] for one in (result["ours"], *result["peers"].values()))


def generation(size: sizes.Workload, *, product: float, read: float) -> float:
    """Seconds: of the products, or of the numbers read, whichever take longer. product: FLOP/s. read: bytes/s."""
    matrices = 12 * size.M * size.D**2 + size.W * size.D  # four of D x D and two of D x 4D of a layer; unembedding
    kept = 2 * size.M * size.B * size.D * (size.new + 1) / 2  # keys and values looked at for a word, in the mean
    return max(2 * size.B * size.new * matrices / product, 4 * size.new * (matrices + kept) / read)
