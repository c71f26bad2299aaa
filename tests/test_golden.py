"""Fixed runs compute what tests/golden.json recorded, to the last bit on the CPU that recorded it."""

import importlib.metadata

import golden
import pytest

TABLE = golden.load_table()
QUICK = "smoke-1", "vit-1"
NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in golden.entries(TABLE)]


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
        assert golden.differences(machines[machine], computed) == []
        return
    other, recorded = next(iter(machines.items()))
    assert golden.loss_differences(TABLE, name, recorded, computed) == []
    pytest.skip(f"compared only losses, not bits: recorded on {other}, this is {machine}")
