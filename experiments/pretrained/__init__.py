"""Open trained models, of tfm or published, write them in published formats, and begin training with them."""
