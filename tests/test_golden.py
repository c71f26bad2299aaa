"""Fixed runs compute the numbers in tests/golden.json, bit for bit on the CPU that recorded them."""

import importlib.metadata
import re

import golden
import pytest

TABLE = golden.load_table()
QUICK = "smoke-1", "vit-1"
NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in golden.entries(TABLE)]
EXACT = 1e-6  # tolerance on the machine that recorded a number
OTHER_MACHINES = 3e-6  # smallest tolerance of losses on other machines
MEMORY = 1e-3  # relative tolerance of memory, which includes the code of a program
LOSS = re.compile("loss|/values/")  # numbers that are nearly equal on other CPUs, unlike accuracies


def differences(record: dict, computed: dict) -> list[str]:
    """Return a sentence for each number that differs or is missing, and for each digest that differs."""
    sentences = []
    for name, expected in record["numbers"].items():
        memory = name.endswith("bytes")
        sentences += difference(
            name, expected, computed["numbers"].get(name), MEMORY if memory else EXACT, may_shrink=memory
        )
    changed_digests = [
        name for name, expected in record["digests"].items() if computed["digests"].get(name) != expected
    ]
    if changed_digests == ["params_sha256"]:
        sentences.append("params_sha256 differs, the arrays do not: parameters have other names")
    elif changed_digests:
        sentences.append(f"the bits differ: {', '.join(changed_digests)}")
    return sentences


def loss_differences(table: dict, entry: str, record: dict, computed: dict) -> list[str]:
    """Return a sentence for each loss that differs by more than rounding errors.

    The tolerance is ten times the range of the losses recorded with other versions of JAX and other numbers of devices,
    and at least OTHER_MACHINES.
    """
    config = entry.rpartition("-")[0]
    siblings = [entry] if config == "study" else [f"{config}-{n}" for n in table["runs"][config]["devices"]]
    machines = [machine for version in table["recorded"].values() for machine in version.values()]
    rows = [machine[name]["numbers"] for machine in machines for name in siblings if name in machine]
    sentences = []
    for name, expected in record["numbers"].items():
        if LOSS.search(name):
            values = [numbers[name] for numbers in rows if name in numbers]
            tolerance = max(OTHER_MACHINES, 10 * (max(values) - min(values)) / max(1.0, abs(expected)))
            sentences += difference(name, expected, computed["numbers"].get(name), tolerance)
    return sentences


def difference(
    name: str, expected: float, actual: float | None, tolerance: float, *, may_shrink: bool = False
) -> list[str]:
    """Return [], or a sentence if the number is missing or differs by more than `tolerance` (relative above 1)."""
    if actual is not None and (
        abs(actual - expected) <= tolerance * max(1.0, abs(expected)) or (may_shrink and actual < expected)
    ):
        return []
    return [f"{name}: {actual} instead of {expected}, tolerance {tolerance:.1e}"]


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_computes_what_was_recorded(name, tmp_path):
    if name.startswith("translation"):
        pytest.importorskip("sacrebleu")
    try:
        version, machine = golden.versions(name), golden.machine(name)
    except importlib.metadata.PackageNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    machines = {key: by_name[name] for key, by_name in TABLE["recorded"].get(version, {}).items() if name in by_name}
    if not machines:
        pytest.skip(f"no numbers of {version} are recorded: python -m tests.record_golden {name}")
    result = golden.compute(TABLE, name, tmp_path)
    if machine in machines:
        assert differences(machines[machine], result) == []
        return
    other_machine, record = next(iter(machines.items()))
    assert loss_differences(TABLE, name, record, result) == []
    pytest.skip(f"compared only losses, not bits: recorded on {other_machine}, this is {machine}")
