"""Run what README.md says to do next, in a folder of its own: the commands of its blocks, but with few steps.

python .ci/readme.py

The files that they name are made: my_text.txt and my_images.npz here, my_score.py of README's own block.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
FEW = ("--config.train.steps=120", "--config.train.evaluate_every=60")  # vit warms up for 100


def main() -> None:
    """Every `python` command of README's blocks but the first, which CI runs as it stands, and the notebook's."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[1:]
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("python ")]
    (notebook,) = re.findall(r"^```python\n(import launch\n.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (score,) = re.findall(r"^```python\n# my_score.py\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    here = pathlib.Path(sys.executable).parent  # whose `python` it is
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "my_score.py").write_text(score, encoding="utf-8")
        (folder / "notebook.py").write_text(notebook.replace("configs/", f"{ROOT}/configs/"), encoding="utf-8")
        (folder / "my_text.txt").write_text(page * 3, encoding="utf-8")
        draw = np.random.default_rng(0)
        images = {f"x_{part}": draw.integers(0, 256, (300, 12, 12), np.uint8) for part in ("train", "test")}
        np.savez(folder / "my_images.npz", **images, **{f"y_{part}": np.arange(300) % 3 for part in ("train", "test")})
        for command in [*commands, "python notebook.py"]:
            print(command, flush=True)
            trains = "launch.py" in command
            command = command.replace("launch.py", str(ROOT / "launch.py")).replace("configs/", f"{ROOT}/configs/")
            words = " ".join([command, *(FEW if trains else ())])
            environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{here}:{os.environ['PATH']}"}
            ended = subprocess.run(words, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
            if ended.returncode:
                sys.exit(f"exit code {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    if len(commands) < 5:
        sys.exit(f"README.md has only {len(commands)} commands in its blocks")


if __name__ == "__main__":
    main()
