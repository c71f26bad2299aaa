"""Record tests/golden.json for the installed JAX and libtpu and this CPU: all entries, or the ones that are listed.

python -m tests.record_golden [smoke-1 vit-1 ...]
"""

import importlib.metadata
import json
import pathlib
import sys
import tempfile
import time

from tests import conftest


def main(names: list[str]) -> None:
    """Compute the entries, and write each into the table as soon as it is computed."""
    import golden  # after conftest, which sets XLA_FLAGS and sys.path

    for name in names or golden.entries(golden.load_table()):
        began = time.monotonic()
        try:
            keys = golden.versions(name), golden.machine(name)
        except importlib.metadata.PackageNotFoundError as error:
            print(f"{name}: {error.name} is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            computed = golden.compute(golden.load_table(), name, pathlib.Path(folder))
        table = golden.load_table()
        table["recorded"].setdefault(keys[0], {}).setdefault(keys[1], {})[name] = computed
        (conftest.HERE / "golden.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
