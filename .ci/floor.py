"""Print the oldest JAX that pyproject.toml admits, as pip reads it: `jax==X jaxlib==X`."""

import pathlib
import re
import tomllib

pyproject = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
(floor,) = [m[1] for d in pyproject["project"]["dependencies"] if (m := re.fullmatch(r"jax>=([\w.]+)", d))]
print(f"jax=={floor} jaxlib=={floor}")
