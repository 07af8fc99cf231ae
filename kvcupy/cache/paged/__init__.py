"""The paged cache: sequences in pages, steps, and their tables on the way to the device."""
