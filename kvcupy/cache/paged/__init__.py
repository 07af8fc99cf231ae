"""The paged cache: sequences in pages, the steps that append to them, and their tables."""
