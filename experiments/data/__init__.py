"""Data: texts, tables, sentence pairs and images are found, read and split; texts are encoded by tokenizers."""
