"""Data: find, read and split texts, tables, sentence pairs and images, and encode texts with tokenizers."""
