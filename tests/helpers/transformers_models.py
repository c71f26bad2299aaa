"""Models of the transformers library with random parameters. Importing this skips a test file without the library."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no requests on the network
torch = pytest.importorskip("torch", reason="parity with PyTorch's models needs the extra [parity]")
transformers = pytest.importorskip("transformers", reason="parity with its models needs the extra [parity]")

VIT = dict(image_size=(15, 10), patch_size=5, num_channels=2, hidden_size=33, num_hidden_layers=2, num_labels=3)
VIT |= dict(num_attention_heads=3, intermediate_size=37)


def make_random(name: str, fields: dict):
    """Return a random model of this transformers class in evaluation mode. No bias is 0 and no gain is 1."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model, generator = kind(kind.config_class(**fields)), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model.eval()


def load_export(kind, folder):
    """Load exported files with a transformers class. Assert that they have exactly the tensors of the model."""
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()
