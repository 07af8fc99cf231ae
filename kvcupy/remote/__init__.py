"""Pages across processes: shared stores, migration, pool identities and the wire format."""
