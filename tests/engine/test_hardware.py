"""The backend: what JAX finds, what --device requires, and one hint if a TPU is not available."""

import jax
import pytest
import tiny
from errors import raises

from experiments.engine import compilation, errors, mesh

HELD = "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 71."


@pytest.fixture
def platforms():
    """A function that sets JAX's flag; afterwards it is as before."""
    before = jax.config.jax_platforms
    yield lambda value: jax.config.update("jax_platforms", value)
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize("device", ["gpu", "tpu", "npu"])
def test_a_device_that_is_not_available_is_refused(tmp_path, device):
    file = tiny.config_file(tmp_path, "vision", **tiny.TRAIN)
    outcome = tiny.run("--config", file, "--workdir", str(tmp_path / "run"), f"--device={device}")
    assert (outcome.code, outcome.out) == (2, "") and not (tmp_path / "run").exists()
    assert device in outcome.err and ("runtime" in outcome.err) == (device == "tpu")


def test_a_tpu_in_use_is_an_error_in_jaxs_words_with_a_hint(platforms, monkeypatch):
    def default_backend():
        if jax.config.jax_platforms == "cpu":
            return "cpu"
        raise RuntimeError(f"{HELD}\nand more")

    monkeypatch.setattr(jax, "default_backend", default_backend)
    for device in ("any", "tpu"):
        platforms(None)
        with raises(errors.UserError, HELD, "--device=cpu") as caught:
            compilation.start(device)
        assert "and more" not in str(caught.value)
    compilation.start("cpu")


def test_a_dry_run_of_a_larger_mesh_has_fake_devices(monkeypatch):
    sizes = {"data": -1, "fsdp": 2, "tensor": 4}
    assert compilation.split(sizes, "any", fake=True) is None  # the tests have eight devices
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    fake = compilation.split(sizes, "any", fake=True)
    assert mesh.make(fsdp=2, tensor=4, devices=fake).devices.size == 8
    with raises(errors.UserError, "mesh", 8192):
        compilation.split({"data": 4096, "fsdp": 2}, "any", fake=True)
