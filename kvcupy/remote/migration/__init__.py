"""Migration of pages to a pool in another process: a sender offers them, a receiver pulls them."""
