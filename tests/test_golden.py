"""Fixed runs compute what tests/golden.json recorded, to the last bit on the CPU that recorded it."""

import importlib.metadata
import re

import golden
import pytest

TABLE = golden.load_table()
QUICK = "smoke-1", "vit-1"
NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in golden.entries(TABLE)]
EXACT = 1e-6  # tolerance on the machine that recorded a number
ELSEWHERE = 3e-6  # least tolerance of losses on other machines
MEMORY = 1e-3  # share of the memory by which it may grow, as the code of a program counts too
LOSS = re.compile("loss|/values/")  # numbers that another CPU gives too; accuracies jump


def differences(recorded: dict, computed: dict) -> list[str]:
    """Return a sentence for each number that differs or is gone, and for each digest that differs."""
    found = []
    for name, right in recorded["numbers"].items():
        memory = name.endswith("bytes")
        found += difference(name, right, computed["numbers"].get(name), MEMORY if memory else EXACT, may_shrink=memory)
    changed = [name for name, right in recorded["digests"].items() if computed["digests"].get(name) != right]
    if changed == ["params_sha256"]:
        found.append("params_sha256 differs, the arrays do not: parameters have other names")
    elif changed:
        found.append(f"the bits differ: {', '.join(changed)}")
    return found


def loss_differences(table: dict, entry: str, recorded: dict, computed: dict) -> list[str]:
    """Return a sentence for each loss that differs by more than rounding explains: ten times as far as the losses that
    other versions of JAX and other numbers of devices have computed lie from each other, and at least ELSEWHERE."""
    config = entry.rpartition("-")[0]
    siblings = [entry] if config == "study" else [f"{config}-{n}" for n in table["runs"][config]["devices"]]
    machines = [machine for version in table["recorded"].values() for machine in version.values()]
    rows = [machine[name]["numbers"] for machine in machines for name in siblings if name in machine]
    found = []
    for name, right in recorded["numbers"].items():
        if LOSS.search(name):
            values = [numbers[name] for numbers in rows if name in numbers]
            tolerance = max(ELSEWHERE, 10 * (max(values) - min(values)) / max(1.0, abs(right)))
            found += difference(name, right, computed["numbers"].get(name), tolerance)
    return found


def difference(name: str, right: float, now: float | None, tolerance: float, *, may_shrink: bool = False) -> list[str]:
    """Return [], or a sentence if the number is gone or differs by more than `tolerance`, relative if it is above 1."""
    if now is not None and (abs(now - right) <= tolerance * max(1.0, abs(right)) or (may_shrink and now < right)):
        return []
    return [f"{name}: {now} instead of {right}, tolerance {tolerance:.1e}"]


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_is_what_was_recorded(name, tmp_path):
    if name.startswith("translation"):
        pytest.importorskip("sacrebleu")
    try:
        version, machine = golden.versions(name), golden.machine(name)
    except importlib.metadata.PackageNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    machines = {key: by_name[name] for key, by_name in TABLE["recorded"].get(version, {}).items() if name in by_name}
    if not machines:
        pytest.skip(f"no numbers of {version} are recorded: python -m tests.record_golden {name}")
    computed = golden.compute(TABLE, name, tmp_path)
    if machine in machines:
        assert differences(machines[machine], computed) == []
        return
    other, recorded = next(iter(machines.items()))
    assert loss_differences(TABLE, name, recorded, computed) == []
    pytest.skip(f"compared only losses, not bits: recorded on {other}, this is {machine}")
